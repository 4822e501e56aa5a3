"""Incarnation numbers: which scheduler of a model is the newest, whatever the nodes' clocks say.

The numbers live in the key-value store of Ray's control service (GCS), which writes a key that must not exist
yet for one caller only. They begin anew when that service loses its memory, and then no actor of the old
cluster is left either.
"""

from dataclasses import dataclass
from typing import Protocol

from serve_app.serving import _ray


class ClaimStore(Protocol):
    """A store in which a key can be made once. Calls may block on the network."""

    def make(self, key: str) -> bool:
        """Make the key; False when it exists already."""
        ...

    def keys(self, prefix: str) -> list[str]:
        """All keys that begin so."""
        ...


class GcsClaimStore:
    """The store in Ray's control service; needs a process that is connected to Ray."""

    def make(self, key: str) -> bool:
        """Make the key; False when it exists already."""
        return _ray.make_key(key)

    def keys(self, prefix: str) -> list[str]:
        """All keys that begin so."""
        return _ray.keys_with(prefix)


@dataclass(frozen=True, slots=True)
class Incarnations:
    """The incarnations of one model's scheduler.

    Attributes:
        scope: tells models and applications of one cluster apart.
    """

    store: ClaimStore
    scope: str

    def claim(self) -> int:
        """Take the next number; nobody else gets it."""
        number = self.newest() + 1
        while not self.store.make(self._key(number)):
            number += 1
        return number

    def newest(self) -> int:
        """Return the highest number claimed so far, 0 before the first."""
        prefix = self._key("")
        # Claims are kept for ever, a few bytes each: deleting old ones could hand a number out twice.
        return max((int(key.removeprefix(prefix)) for key in self.store.keys(prefix)), default=0)

    def _key(self, number: int | str) -> str:
        return f"incarnation/{self.scope}/{number}"
