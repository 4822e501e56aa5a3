"""Is it worth sending a request to the replica that knows its beginning, though another has less to do?

The rule compares the replica that load alone would choose with those that hold more of the prompt:

    saved  = C(remaining there by load) - C(remaining here)
    waited = C(mean remaining prefill) * (prefills not begun or not ended here, more than there)
    slowed = expected output * (requests in flight here, more than there) * cost of one more in each step
    go where saved - waited - slowed is largest, if that is above zero; otherwise by load

`C` is the learned prefill time, so all terms are seconds of this request. A replica with less to do than the
one chosen by load, which can be when free KV tokens decide, has negative terms and gains by them. Only
replicas that may take the request right now are compared: affinity never keeps room idle, and a request
never waits for "its" replica. Sessions stay put as long as their replica has room, and move when it has not.

Source: cache-aware routers (SGLang, llm-d, Ray's prefix router) balance a hit ratio against a queue length by
thresholds that somebody has to set; here both sides are times.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from serve_app.request import Request, TextCategory
from serve_app.routing.ledger import ReplicaState
from serve_app.routing.prefill_cost import PrefillCost
from serve_app.routing.prefix_blocks import cached_tokens
from serve_app.routing.prefix_index import PrefixIndex
from serve_app.routing.replica import ReplicaSpec

_MEAN_WEIGHT = 0.02


@dataclass(frozen=True, slots=True, kw_only=True)
class AffinitySettings:
    """How much the prefix caches of engines count when a replica is chosen."""

    __pydantic_config__: ClassVar[Mapping[str, Any]] = {"extra": "forbid"}

    # Off for engines without prefix caching; vLLM has it unless told otherwise.
    enabled: bool = True
    # Share of a KV cache that is taken for prompts of the past: answers and running requests take the rest.
    # Too much promises hits that are no longer there, too little forgets sessions that still are.
    capacity_ratio: float = 0.7
    # Bounds the index's memory at about 100 MB; 500 blocks for each of a thousand replicas.
    max_blocks: int = 500_000
    # Replicas that are compared with the one chosen by load, those with the longest match first.
    max_candidates: int = 8
    # What one more request in the batch adds to each decode step, in prefill tokens: 3.2 for a 70B model on
    # four H100, 0.8 for an 8B model on an RTX 4090. More keeps load more even, less keeps more sessions.
    step_cost_tokens: float = 2.0

    def __post_init__(self) -> None:
        if not 0 < self.capacity_ratio <= 1:
            raise ValueError(
                f"affinity.capacity_ratio must be above 0 and at most 1, got {self.capacity_ratio}"
            )
        for name in ("max_blocks", "max_candidates"):
            if getattr(self, name) < 1:
                raise ValueError(f"affinity.{name} must be at least 1, got {getattr(self, name)}")
        if self.step_cost_tokens < 0:
            raise ValueError(f"affinity.step_cost_tokens must not be negative, got {self.step_cost_tokens}")


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
        self._mean_remaining_tokens = 0.0
        self._sent = 0

    def __repr__(self) -> str:
        mean = self._mean_remaining_tokens
        return f"<PrefixAffinity {self.index} mean_remaining_tokens={mean:.0f}>"

    # What replicas hold

    def join(self, spec: ReplicaSpec) -> None:
        """A replica has joined, with an empty cache as far as anybody knows."""
        if self._settings.enabled:
            self.index.join(spec.replica_id, int(spec.kv_tokens * self._settings.capacity_ratio))

    def lose(self, replica_id: str) -> None:
        """A replica is gone, and its cache with it."""
        self.index.lose(replica_id)

    def sent(self, replica_id: str, wanted: Wanted) -> None:
        """A replica has been sent a request; what it holds of the prompt is counted before that."""
        if not self._settings.enabled:
            return
        remaining = self.remaining_on(replica_id, wanted)
        self._sent += 1
        step = max(_MEAN_WEIGHT, 1 / self._sent)
        self._mean_remaining_tokens += step * (remaining - self._mean_remaining_tokens)
        self.index.add(replica_id, wanted.request.prefix)

    # Remaining prefill

    def remaining(self, request: Request, prompt_tokens: int) -> int:
        """Tokens of a prompt that are left to compute where most of it is cached; at least 1.

        For order and length before a replica is chosen: it errs low, as that replica may have no room.
        """
        return self._left(request, prompt_tokens, self.index.longest(request.prefix))

    def remaining_on(self, replica_id: str, wanted: Wanted) -> int:
        """Tokens of a prompt that are left to compute on this replica; at least 1."""
        blocks, _ = self.index.better_than(replica_id, wanted.request.prefix, at_most=0)
        return self._left(wanted.request, wanted.prompt_tokens, blocks)

    def _left(self, request: Request, prompt_tokens: int, blocks: int) -> int:
        if not blocks:
            return prompt_tokens
        ratio = self._bytes_per_token(request.shape.category)
        return max(1, prompt_tokens - cached_tokens(request.shape, blocks, ratio))

    # Choice

    def choose(
        self, by_load: ReplicaState, wanted: Wanted, able: Callable[[str], ReplicaState | None]
    ) -> ReplicaState:
        """The replica to send a request to: that which load chose, or one that holds enough more of it.

        Args:
            able: the named replica if it may take the request right now, else None.
        """
        request = wanted.request
        if not request.prefix:
            return by_load
        held, more = self.index.better_than(
            by_load.spec.replica_id, request.prefix, self._settings.max_candidates
        )
        if not more:
            return by_load
        remaining = self._left(request, wanted.prompt_tokens, held)
        best, best_gain_s = by_load, 0.0
        for match in more:
            replica = able(match.replica_id)
            if replica is None:
                continue
            saved_tokens = remaining - self._left(request, wanted.prompt_tokens, match.blocks)
            gain_s = saved_tokens * self._prefill_cost.per_token_s - self._extra_s(replica, by_load, wanted)
            if gain_s > best_gain_s:
                best, best_gain_s = replica, gain_s
        return best

    def _extra_s(self, replica: ReplicaState, by_load: ReplicaState, wanted: Wanted) -> float:
        """Seconds that the request loses by being on `replica` rather than on the one chosen by load."""
        cost = self._prefill_cost
        waited_s = cost.seconds(self._mean_remaining_tokens) * (replica.unstarted - by_load.unstarted)
        step_s = self._settings.step_cost_tokens * cost.per_token_s
        slowed_s = wanted.output_tokens * step_s * (replica.in_flight - by_load.in_flight)
        return waited_s + slowed_s
