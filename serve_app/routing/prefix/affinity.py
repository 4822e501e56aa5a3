"""Prefix affinity: whether a cached prefix is worth more than the lower load of another replica.

The rule compares the replica that load alone would choose (`there`) with those that have more of the prompt
cached (`here`):

    saved  = (tokens left to compute there - tokens left here) * t
    waited = (prefill tokens pending here - pending there) * t
    slowed = expected output * (requests in flight here - in flight there) * step_cost_tokens * t
    choose the largest saved - waited - slowed, if that is above zero; otherwise the one chosen by load

`t` is the learned prefill time of a token, so all terms are seconds of this request. A replica may have less
work than the one chosen by load, because load is judged by free KV tokens. Its terms are then negative, and
count as gains. Only replicas that may take the request right now are compared. So affinity never leaves
capacity idle, and a request never waits for one replica.

Source: cache-aware routers (SGLang, llm-d, Ray's prefix router) balance a hit ratio against a queue length by
thresholds that an operator sets. Here both sides are times.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated

from serve_app.request import Request, TextCategory
from serve_app.routing.prefill_cost import PrefillCosts
from serve_app.routing.prefix.blocks import cached_tokens
from serve_app.routing.prefix.index import PrefixIndex
from serve_app.routing.replica import ReplicaSpec
from serve_app.routing.replica_state import ReplicaState
from serve_app.settings_base import INTERNAL, NOT_NEGATIVE, POSITIVE_SHARE, at_least, settings

# Replicas compared with the one chosen by load, those with the longest match first.
_MAX_CANDIDATES = 8


@settings(block="affinity")
class AffinitySettings:
    """How the prefix caches of engines count when a replica is chosen."""

    # For engines without prefix caching, switch it off; vLLM has it by default.
    enabled: bool = True
    # Share of a KV cache assumed to hold past prompts; answers and running requests take the rest. Too much
    # expects hits on evicted prefixes, too little forgets prefixes that are still cached.
    capacity_ratio: Annotated[float, POSITIVE_SHARE, INTERNAL] = 0.7
    # Bounds the index's memory at about 160 MB; 500 blocks for each of a thousand replicas.
    max_blocks: Annotated[int, at_least(1), INTERNAL] = 500_000
    # What one more request in the batch adds to each decode step, in prefill tokens: 3.2 by the profile of a
    # 70B model on four H100, 0.8 for an 8B model on an RTX 4090. Higher balances load more evenly, lower
    # keeps more sessions on their replica.
    step_cost_tokens: Annotated[float, NOT_NEGATIVE, INTERNAL] = 2.0


@dataclass(frozen=True, slots=True)
class PrefixQuery:
    """A prompt that a replica is sought for.

    Attributes:
        prompt_tokens: expected, cached or not.
        output_tokens: expected, of all choices.
    """

    request: Request
    prompt_tokens: int
    output_tokens: int


@dataclass(frozen=True, slots=True)
class PrefixPlacement:
    """A replica, and the tokens of the prompt that are left to compute there."""

    replica: ReplicaState
    prefill_tokens: int


ReplicaFilter = Callable[[str, int], ReplicaState | None]
"""The named replica if it may be sent a request now with so many tokens to compute, else None."""


# Of a replica that does not state its cache: what a small GPU holds of a model of 8B.
_LIKELY_KV_TOKENS = 100_000


class PrefixAffinity:
    """Weighs prefix caches against load, for the replicas of one model.

    Args:
        prefill_costs: the scheduler's own, which go on learning.
        bytes_per_token: the learned ratio of a text category.
    """

    def __init__(
        self,
        settings: AffinitySettings,
        prefill_costs: PrefillCosts,
        bytes_per_token: Callable[[TextCategory], float],
    ) -> None:
        self._settings = settings
        self._prefill_costs = prefill_costs
        self._bytes_per_token = bytes_per_token
        self.index = PrefixIndex(settings.max_blocks)

    def __repr__(self) -> str:
        return f"<PrefixAffinity {'on' if self._settings.enabled else 'off'} {self.index}>"

    # What replicas have cached

    def join(self, spec: ReplicaSpec) -> None:
        """A replica has joined; its cache is taken to be empty."""
        if self._settings.enabled:
            kv_tokens = _LIKELY_KV_TOKENS if spec.kv_tokens is None else spec.kv_tokens
            self.index.join(spec.replica_id, int(kv_tokens * self._settings.capacity_ratio))

    def lose(self, replica_id: str) -> None:
        """A replica is gone, and its cache with it."""
        self.index.lose(replica_id)

    def on_dispatch(self, replica_id: str, request: Request) -> None:
        """A replica has been sent a request."""
        self.index.add(replica_id, request.submission.prefix)

    # Choice

    def cached_tokens(self, request: Request, prompt_tokens: int) -> int:
        """Tokens of a prompt that the replica with the longest match has cached; never all of them.

        It is used before a replica is chosen. It is an upper estimate, since that replica may have no
        capacity.
        """
        return prompt_tokens - self._left(
            request, prompt_tokens, self.index.longest(request.submission.prefix)
        )

    def choose(
        self, by_load: ReplicaState | None, query: PrefixQuery, admissible: ReplicaFilter
    ) -> PrefixPlacement | None:
        """The replica that load chose, or one that has enough more of the prompt cached.

        Args:
            by_load: None when no replica may take the whole prompt. The first admissible one that has a part
                of it cached is chosen then.
        """
        request, prompt_tokens = query.request, query.prompt_tokens
        if not request.submission.prefix:
            return None if by_load is None else PrefixPlacement(by_load, prompt_tokens)
        name = "" if by_load is None else by_load.spec.replica_id
        held, more = self.index.better_than(name, request.submission.prefix, _MAX_CANDIDATES)
        best = None if by_load is None else PrefixPlacement(by_load, self._left(request, prompt_tokens, held))
        baseline, best_gain_s = best, 0.0
        for match in more:
            left = self._left(request, prompt_tokens, match.blocks)
            replica = admissible(match.replica_id, left)
            if replica is None:
                continue
            if baseline is None:
                return PrefixPlacement(replica, left)
            gain_s = self._gain_s(PrefixPlacement(replica, left), baseline, query)
            if gain_s > best_gain_s:
                best, best_gain_s = PrefixPlacement(replica, left), gain_s
        return best

    def _gain_s(self, here: PrefixPlacement, there: PrefixPlacement, query: PrefixQuery) -> float:
        """Seconds that the request saves here rather than there."""
        saved = there.prefill_tokens - here.prefill_tokens
        waited = here.replica.pending_prefill_tokens - there.replica.pending_prefill_tokens
        more_in_flight = here.replica.in_flight - there.replica.in_flight
        slowed = query.output_tokens * more_in_flight * self._settings.step_cost_tokens
        return (saved - waited - slowed) * self._prefill_costs.of(here.replica.spec.pool).per_token_s

    def _left(self, request: Request, prompt_tokens: int, blocks: int) -> int:
        if not blocks:
            return prompt_tokens
        ratio = self._bytes_per_token(request.shape.category)
        return max(1, prompt_tokens - cached_tokens(request.shape, blocks, ratio))
