"""Prefix affinity: the trade-off between cached prefixes and load in the choice of a replica.

The replica selected by load alone is compared with replicas that have more of the prompt cached. The request
goes to the one with the least cost:

    cost = (tokens left to compute there + prefill tokens pending there) * (requests in flight there + 1)

The sum stands for the time to the first token, and the factor for the time of each further one. So sessions
spread over the fleet before a cache overflows. Only replicas that may accept the request now are compared.
Affinity therefore leaves no capacity idle, and a request never waits for one replica.

Source: LMetric (arXiv 2603.15202), which knows all caches exactly, and dispatches at arrival.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

from serve_app.core.routing.prefix.blocks import cached_tokens
from serve_app.core.routing.prefix.index import PrefixIndex
from serve_app.core.routing.replica import ReplicaSpec
from serve_app.core.routing.replica_state import ReplicaState
from serve_app.core.routing.speeds import cost
from serve_app.core.settings_base import settings
from serve_app.request import PromptShape, Request

# Replicas compared with the one selected by load, those with the longest match first.
_MAX_CANDIDATES = 8

ReplicaFilter = Callable[[str, int], ReplicaState | None]
"""Returns the replica with an id if it may accept a request with so many tokens to compute, else None."""

# Assumed KV cache of a replica that does not report its size: a small GPU with an 8B model.
LIKELY_KV_TOKENS = 100_000
# Bounds the index's memory at about 160 MB; 500 blocks for each of a thousand replicas.
_MAX_BLOCKS = 500_000


@settings(block="affinity")
class AffinitySettings:
    """Weight of the engines' prefix caches in the choice of a replica."""

    # Disable it for engines without prefix caching. vLLM enables prefix caching by default.
    enabled: bool = True


@dataclass(frozen=True, slots=True)
class PrefixQuery:
    """A prompt to be placed, with its expected prompt tokens."""

    request: Request
    prompt_tokens: int


@dataclass(frozen=True, slots=True)
class PrefixPlacement:
    """A replica, and the tokens of the prompt that remain to be computed there."""

    replica: ReplicaState
    prefill_tokens: int


class PrefixAffinity:
    """Weighs prefix caches against load, for the replicas of one model.

    Args:
        bytes_per_token: returns the learned ratio of a prompt's text.
    """

    def __init__(
        self,
        settings: AffinitySettings,
        bytes_per_token: Callable[[PromptShape], float],
    ) -> None:
        self._settings = settings
        self._bytes_per_token = bytes_per_token
        self.index = PrefixIndex(_MAX_BLOCKS)

    def __repr__(self) -> str:
        return f"<PrefixAffinity {'on' if self._settings.enabled else 'off'} {self.index}>"

    # What replicas have cached

    def join(self, spec: ReplicaSpec) -> None:
        """Add a replica that has joined, with an empty cache."""
        if self._settings.enabled:
            kv_tokens = LIKELY_KV_TOKENS if spec.kv_tokens is None else spec.kv_tokens
            self.index.join(spec.replica_id, kv_tokens)

    def lose(self, replica_id: str) -> None:
        """Remove a lost replica and its cache."""
        self.index.lose(replica_id)

    def on_dispatch(self, replica_id: str, request: Request) -> None:
        """Add the prompt of a dispatched request to the replica's cache."""
        self.index.add(replica_id, request.submission.prefix)

    # Choice

    def cached_tokens(self, request: Request, prompt_tokens: int) -> int:
        """Return the prompt tokens cached by the replica with the longest match; never all of them.

        It is used before a replica is selected. It is an upper estimate, because that replica may have no
        capacity.
        """
        return prompt_tokens - self._left(
            request, prompt_tokens, self.index.longest(request.submission.prefix)
        )

    def cached_on(self, replica_id: str, request: Request, prompt_tokens: int) -> int:
        """Return the prompt tokens cached by one replica; never all of them."""
        held, _ = self.index.better_than(replica_id, request.submission.prefix, 0)
        return prompt_tokens - self._left(request, prompt_tokens, held)

    def choose(
        self, by_load: ReplicaState | None, query: PrefixQuery, admissible: ReplicaFilter
    ) -> PrefixPlacement | None:
        """Return the replica selected by load, or one with sufficiently more of the prompt cached.

        Args:
            by_load: None if no replica may accept the whole prompt. Then the first admissible replica that
                has a part of it cached is returned.
        """
        request, prompt_tokens = query.request, query.prompt_tokens
        if not request.submission.prefix:
            return None if by_load is None else PrefixPlacement(by_load, prompt_tokens)
        name = "" if by_load is None else by_load.spec.replica_id
        held, more = self.index.better_than(name, request.submission.prefix, _MAX_CANDIDATES)
        best = None if by_load is None else PrefixPlacement(by_load, self._left(request, prompt_tokens, held))
        least = math.inf if best is None else cost(best.replica, best.prefill_tokens)
        for match in more:
            left = self._left(request, prompt_tokens, match.blocks)
            replica = admissible(match.replica_id, left)
            if replica is None:
                continue
            placement = PrefixPlacement(replica, left)
            if by_load is None:
                return placement
            if (figure := cost(replica, left)) < least:
                best, least = placement, figure
        return best

    def _left(self, request: Request, prompt_tokens: int, blocks: int) -> int:
        if not blocks:
            return prompt_tokens
        ratio = self._bytes_per_token(request.shape)
        return max(1, prompt_tokens - cached_tokens(request.shape, blocks, ratio))
