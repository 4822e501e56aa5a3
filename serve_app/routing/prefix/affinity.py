"""Is it worth sending a request to the replica that knows its beginning, though another has less to do?

The rule compares the replica that load alone would choose with those that hold more of the prompt:

    saved  = (tokens left to compute there - tokens left here) * t
    waited = (prefill tokens promised here and not begun to be answered - those there) * t
    slowed = expected output * (requests in flight here - those there) * step_cost_tokens * t
    go where saved - waited - slowed is largest, if that is above zero; otherwise by load

`t` is the learned prefill time of a token, so all terms are seconds of this request. A replica with less to
do than the one chosen by load, which can be when free KV tokens decide, has negative terms and gains by them.
Only replicas that may take the request right now are compared: affinity never keeps room idle, and a request
never waits for "its" replica. Sessions stay put as long as their replica has room, and move when it has not.

Source: cache-aware routers (SGLang, llm-d, Ray's prefix router) balance a hit ratio against a queue length by
thresholds that somebody has to set; here both sides are times.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated

from serve_app.request import Request, TextCategory
from serve_app.routing.prefill_cost import PrefillCost
from serve_app.routing.prefix.blocks import cached_tokens
from serve_app.routing.prefix.index import PrefixIndex
from serve_app.routing.replica import ReplicaSpec
from serve_app.routing.replica_state import ReplicaState
from serve_app.settings_base import NOT_NEGATIVE, POSITIVE_SHARE, at_least, settings


@settings(block="affinity")
class AffinitySettings:
    """How much the prefix caches of engines count when a replica is chosen."""

    # Off for engines without prefix caching; vLLM has it unless told otherwise.
    enabled: bool = True
    # Share of a KV cache that is taken for prompts of the past: answers and running requests take the rest.
    # Too much promises hits that are no longer there, too little forgets sessions that still are.
    capacity_ratio: Annotated[float, POSITIVE_SHARE] = 0.7
    # Bounds the index's memory at about 180 MB; 500 blocks for each of a thousand replicas.
    max_blocks: Annotated[int, at_least(1)] = 500_000
    # Replicas that are compared with the one chosen by load, those with the longest match first.
    max_candidates: Annotated[int, at_least(1)] = 8
    # What one more request in the batch adds to each decode step, in prefill tokens: 3.2 for a 70B model on
    # four H100, 0.8 for an 8B model on an RTX 4090. More keeps load more even, less keeps more sessions.
    step_cost_tokens: Annotated[float, NOT_NEGATIVE] = 2.0


@dataclass(frozen=True, slots=True)
class Wanted:
    """A request that is about to be dispatched.

    Attributes:
        prompt_tokens: expected, cached or not.
        output_tokens: expected, of all choices.
    """

    request: Request
    prompt_tokens: int
    output_tokens: int


@dataclass(frozen=True, slots=True)
class Placed:
    """A replica, and how many tokens of the prompt are left to compute there."""

    replica: ReplicaState
    prefill_tokens: int


Able = Callable[[str, int], ReplicaState | None]
"""The named replica if it may be sent a request right now with so many tokens to compute, else None."""


class PrefixAffinity:
    """Weighs prefix caches against load, for the replicas of one model.

    Args:
        prefill_cost: the scheduler's own; it goes on learning.
        bytes_per_token: learned ratio by kind of text.
    """

    def __init__(
        self,
        settings: AffinitySettings,
        prefill_cost: PrefillCost,
        bytes_per_token: Callable[[TextCategory], float],
    ) -> None:
        self._settings = settings
        self._prefill_cost = prefill_cost
        self._bytes_per_token = bytes_per_token
        self.index = PrefixIndex(settings.max_blocks)

    def __repr__(self) -> str:
        return f"<PrefixAffinity {'on' if self._settings.enabled else 'off'} {self.index}>"

    # What replicas hold

    def join(self, spec: ReplicaSpec) -> None:
        """A replica has joined, with an empty cache as far as anybody knows."""
        if self._settings.enabled:
            self.index.join(spec.replica_id, int(spec.kv_tokens * self._settings.capacity_ratio))

    def lose(self, replica_id: str) -> None:
        """A replica is gone, and its cache with it."""
        self.index.lose(replica_id)

    def on_dispatch(self, replica_id: str, request: Request) -> None:
        """A replica has been sent a request."""
        self.index.add(replica_id, request.submission.prefix)

    # Choice

    def cached_tokens(self, request: Request, prompt_tokens: int) -> int:
        """Tokens of a prompt that need no computing where most of it is cached; never all of them.

        For order and length before a replica is chosen: it errs high, as that replica may have no room.
        """
        return prompt_tokens - self._left(
            request, prompt_tokens, self.index.longest(request.submission.prefix)
        )

    def choose(self, by_load: ReplicaState | None, wanted: Wanted, able: Able) -> Placed | None:
        """Where to send a request: to the replica that load chose, or to one that holds enough more of it.

        Args:
            by_load: None when none may take the whole prompt; then whoever may take what is left of it.
        """
        request, prompt_tokens = wanted.request, wanted.prompt_tokens
        if not request.submission.prefix:
            return None if by_load is None else Placed(by_load, prompt_tokens)
        name = "" if by_load is None else by_load.spec.replica_id
        held, more = self.index.better_than(name, request.submission.prefix, self._settings.max_candidates)
        best = None if by_load is None else Placed(by_load, self._left(request, prompt_tokens, held))
        by_load_placed, best_gain_s = best, 0.0
        for match in more:
            left = self._left(request, prompt_tokens, match.blocks)
            replica = able(match.replica_id, left)
            if replica is None:
                continue
            if by_load_placed is None:
                return Placed(replica, left)
            gain_s = self._gain_s(Placed(replica, left), by_load_placed, wanted)
            if gain_s > best_gain_s:
                best, best_gain_s = Placed(replica, left), gain_s
        return best

    def _gain_s(self, here: Placed, there: Placed, wanted: Wanted) -> float:
        """Seconds that the request gains by being here rather than there."""
        saved = there.prefill_tokens - here.prefill_tokens
        waited = here.replica.pending_prefill_tokens - there.replica.pending_prefill_tokens
        more_in_flight = here.replica.in_flight - there.replica.in_flight
        slowed = wanted.output_tokens * more_in_flight * self._settings.step_cost_tokens
        return (saved - waited - slowed) * self._prefill_cost.per_token_s

    def _left(self, request: Request, prompt_tokens: int, blocks: int) -> int:
        if not blocks:
            return prompt_tokens
        ratio = self._bytes_per_token(request.shape.category)
        return max(1, prompt_tokens - cached_tokens(request.shape, blocks, ratio))
