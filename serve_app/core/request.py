"""A request inside the scheduler, from its admission to its outcome."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from serve_app.core.accounting.wait_causes import WaitTally
from serve_app.core.commands import Dispatch
from serve_app.core.programs.program import ProgramTurn
from serve_app.core.routing.estimation.estimate import TokenEstimate
from serve_app.core.routing.replica_state import PrefillClass, Running
from serve_app.errors import Outcome
from serve_app.request import Destination, LatencyTarget, Request, Usage

# Outcomes after which the engine may have worked for the client without reporting usage.
_SERVED = frozenset({Outcome.COMPLETED, Outcome.CANCELLED})

WaitKind = tuple[int, int, bool, bool]
"""Class rank, bit length of the expected prompt tokens, whether it claimed a retry reservation, and whether
its first token has a latency target."""


@dataclass(frozen=True, slots=True)
class PredictedWait:
    """The predicted wait of a request, computed at its arrival, in seconds.

    Attributes:
        at: time of the prediction.
        uncorrected_s: work ahead / drain rate.
        wait_s: the same, times the correction of its kind.
    """

    kind: WaitKind
    at: float
    uncorrected_s: float
    wait_s: float


@dataclass(slots=True, eq=False)
class TargetState:
    """The latency target of a request on the scheduler's clock, see `latency_targets`.

    Attributes:
        due_at: time by which its first token is due; infinite without a limit.
        urgent_at: time from which it precedes others of equal claim; infinite outside the queue.
        latest_at: time after which a dispatch would be too late; infinite outside the queue.
        is_late: whether its latest dispatch has passed while it was queued.
        is_promised: whether it is a retry at the time that its first attempt was told.
        wait_s: expected wait, as of its arrival.
        expected_s: expected TTFT, as of its arrival; None if it was not predicted.
        chance: chance that the first token is late, as of its arrival.
        sent_s: expected time from its last dispatch to the first token.
        is_met: whether its first token was in time; None before it, and without a limit.
        tokens: its tokens that count as waiting work with a target; 0 outside the queue.
    """

    limits: LatencyTarget
    due_at: float
    urgent_at: float = math.inf
    latest_at: float = math.inf
    is_late: bool = False
    is_promised: bool = False
    wait_s: float = 0.0
    expected_s: float | None = None
    chance: float | None = None
    sent_s: float = 0.0
    is_met: bool | None = None
    tokens: int = 0

    @property
    def is_ordered(self) -> bool:
        """True if its place in the queue depends on its target."""
        return self.latest_at < math.inf and not self.is_late


@dataclass(frozen=True, slots=True)
class Attempts:
    """The traces that earlier attempts to serve a request have left. Replaced as a whole at each change.

    Attributes:
        put_backs: number of put-backs, for any reason but a revocation.
        returned: whether it was put back for a fault of its replica and precedes requests never dispatched.
        generated: output tokens so far with which it continues.
        losses: replicas lost under it; after the first loss it is in quarantine.
        avoided: replicas on which it has failed.
        failed_on: the replica on which it failed last, until an answer starts.
        last_failure: reason of the last failure, as reported by its gateway.
        moved_from: the replica from which it was moved because its first token was overdue; None for none.
        backoff_until: end of its backoff, before which it is not dispatched; 0 without a backoff.
        above_tokens: longest context limit of the engines that rejected it as too long.
        too_long_for: replicas without a reported context limit that rejected it as too long.
    """

    put_backs: int = 0
    returned: bool = False
    generated: int = 0
    losses: int = 0
    avoided: frozenset[str] = frozenset()
    failed_on: str | None = None
    last_failure: str = ""
    moved_from: str | None = None
    backoff_until: float = 0.0
    above_tokens: int = 0
    too_long_for: tuple[str, ...] = ()


NO_ATTEMPTS = Attempts()


@dataclass(slots=True, eq=False)
class ScheduledRequest:
    """One request, queued or running.

    Attributes:
        sequence: order of admission; breaks ties.
        pools: pools that may serve it, the home pool first.
        expires_at: end of its queue timeout.
        length_queue: the length queue in which it waits or waited.
        claimed: whether it claimed a retry reservation and precedes others of its sub-queue.
        starved_at: time after which it is promoted; infinite outside the queue and without promotion.
        attempts: the traces of its earlier attempts.
        running: its place on a replica; None while it is queued, and after its end.
        prefill_class: class of its whole prefill, by the boundaries at its admission (see `isolation`).
        cached_tokens: cached tokens of its prompt on its replica; while queued, on the replica with the most.
        prefill_tokens: expected uncached prompt tokens, at least 1; the length of the request for policies.
        dispatched_at: time of its last dispatch, or of its arrival at this scheduler if it ran already.
        dispatch: its last dispatch by this scheduler; None before one.
        charged: service charged to its tenant for it.
        key_charge: tokens charged to the limit of its key; None without such a limit.
        usage: token counts of its engine, after its end.
        seen_tokens: output tokens that its gateway has seen, after its end.
        prediction: its predicted wait; None if none was possible or it was put back.
        fcfs_turn: prompt tokens that leave the queue before it in order of arrival, see
            `queueing.delay_bound`; None for short prompts, and outside the queue.
        turn: its turn in a program; None if it belongs to none.
        waits: its wait so far by cause; None until it has waited.
        target: its latency target; None without one.
    """

    request: Request
    estimate: TokenEstimate
    sequence: int
    pools: tuple[str, ...]
    expires_at: float = math.inf
    length_queue: str = ""
    claimed: bool = False
    starved_at: float = math.inf
    attempts: Attempts = NO_ATTEMPTS
    queued: bool = False
    running: Running | None = None
    prefill_class: PrefillClass = PrefillClass.SHORT
    cached_tokens: int = 0
    dispatched_at: float = 0.0
    dispatch: Dispatch | None = None
    charged: float = 0.0
    key_charge: int | None = None
    usage: Usage | None = None
    seen_tokens: int = 0
    prediction: PredictedWait | None = None
    fcfs_turn: int | None = None
    turn: ProgramTurn | None = None
    waits: WaitTally | None = None
    target: TargetState | None = None
    prefill_tokens: int = field(init=False)

    def __post_init__(self) -> None:
        self.expect_cached(self.cached_tokens)

    def expect_cached(self, tokens: int) -> None:
        """Set the cached tokens of its prompt, and with them the tokens to prefill."""
        self.cached_tokens = tokens
        self.prefill_tokens = max(1, self.estimate.expected_prompt_tokens - tokens)

    def expect(self, estimate: TokenEstimate) -> None:
        """Replace the estimate."""
        self.estimate = estimate
        self.expect_cached(self.cached_tokens)

    @property
    def replica_id(self) -> str | None:
        """Its replica; None while it is queued, and after its end."""
        return None if self.running is None else self.running.replica.spec.replica_id

    @property
    def started_at(self) -> float | None:
        """Time at which its answer started; None before that, and if an earlier scheduler observed it."""
        return None if self.running is None else self.running.started_at

    @property
    def started(self) -> bool:
        """True if it is on a replica, and its answer has started."""
        return self.running is not None and self.running.started

    @property
    def resident_on(self) -> str | None:
        """The replica that it is bound to because the context of its program is there; None for any."""
        return None if self.turn is None else self.turn.resident_on

    @property
    def parked(self) -> bool:
        """True if it waits for room for the context of its program, see `programs`."""
        return self.turn is not None and self.turn.parked

    @property
    def destination(self) -> Destination:
        """The replicas of its pools that may serve it."""
        destination, replica_id = self.request.destination, self.resident_on
        return destination if replica_id is None else Destination(replica_id, destination.adapter)

    def used_after(self, outcome: Outcome) -> Usage | None:
        """Return the tokens of a dispatched request that has ended, for limits, budgets and usage.

        They are the engine's count or, if it reported none but may have worked for the client, the estimate.
        An answer that ended early has at least the tokens that were seen of it, whatever ended it. None if
        the request failed or was lost before its first token.
        """
        generated, usage = self.attempts.generated, self.usage
        seen = max(self.seen_tokens, generated)
        if usage is not None:
            is_whole = outcome is Outcome.COMPLETED or usage.output_tokens >= seen
            return usage if is_whole else replace(usage, output_tokens=seen)
        was_served = outcome in _SERVED
        if not (was_served or seen):
            return None
        expected = generated + self.estimate.expected_output_tokens if was_served else 0
        # After a put-back, the estimated prompt includes what was generated.
        prompt = self.estimate.expected_prompt_tokens - generated
        return Usage(prompt_tokens=prompt, output_tokens=max(expected, seen))

    def __repr__(self) -> str:
        state = f"waiting in {self.length_queue}" if self.queued else f"running on {self.replica_id}"
        return f"<ScheduledRequest {self.request.request_id} {self.estimate.budget_tokens} tokens {state}>"


def of_gateway(requests: Mapping[str, ScheduledRequest], gateway_id: str) -> list[ScheduledRequest]:
    """Return the requests whose client is connected to this gateway."""
    return [each for each in requests.values() if each.request.gateway_id == gateway_id]
