"""Incarnation numbers, which order the schedulers of a model independently of the nodes' clocks.

They are stored in Ray's control service (GCS), whose key-value store creates a key for one caller only. They
restart if that service loses its memory, in which case no actor of the old cluster is left.
"""

from dataclasses import dataclass
from typing import Protocol

from serve_app.serving import _ray


class ClaimStore(Protocol):
    """Store in which a key can be created once. Calls may block on the network."""

    def make(self, key: str) -> bool:
        """Create a key, and return whether it is new."""
        ...

    def keys(self, prefix: str) -> list[str]:
        """Return all keys with a prefix."""
        ...


class GcsClaimStore:
    """Store in Ray's control service; needs a connection to Ray."""

    def make(self, key: str) -> bool:
        """Create a key, and return whether it is new."""
        return _ray.make_key(key)

    def keys(self, prefix: str) -> list[str]:
        """Return all keys with a prefix."""
        return _ray.keys_with(prefix)


@dataclass(frozen=True, slots=True)
class Incarnations:
    """Incarnations of one model's scheduler; `scope` is unique to model and application in the cluster."""

    store: ClaimStore
    scope: str

    def claim(self) -> int:
        """Claim the next number exclusively."""
        number = self.newest() + 1
        while not self.store.make(self._key(number)):
            number += 1
        return number

    def newest(self) -> int:
        """Return the highest claimed number; 0 before the first."""
        prefix = self._key("")
        # Claims of a few bytes are never deleted, because that could issue a number twice.
        claims = (key.removeprefix(prefix) for key in self.store.keys(prefix))
        # Others are of a model whose name begins with this one's, as `qwen/qwen3` does with `qwen`.
        return max((int(claim) for claim in claims if "/" not in claim), default=0)

    def _key(self, number: int | str) -> str:
        return f"incarnation/{self.scope}/{number}"
