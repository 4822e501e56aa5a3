"""Reward: one number for how well the requests of an interval were served.

The digital twin and trials in production call the same function, so a candidate wins in both by the same
measure. A reward that cannot be measured is None, never a number: too few requests, or too few of them with
the necessary timestamps, must not look like an improvement.

The default, `slo` (a definition of this project), consists of what clients notice:

    R = attainment - 0.25 * tail - 0.25 * slowness - 0.25 * unfairness

All four terms are between 0 and 1 and dimensionless:

- `attainment`: share of the requests served within the targets of their class. It is goodput over offered
  load, so windows of different rates are comparable.
- `tail`: the worst class's 99th percentile of lateness (`ClassTargets.lateness`): 0.5 is a p99 at its target.
- `slowness`: mean lateness, with equal weight per class. It distinguishes settings even if all targets are
  met, or none, and as a mean it has far less noise than a percentile.
- `unfairness`: 1 less Jain's index over each tenant's part of its fair share
  (`metrics.summary.jain_of_tenants`).

`paper` is the reward of EWSJF (arXiv 2601.21758), section 4.4: how well the queues fit the lengths, and how
long requests wait.

    R = l1 * C + l2 * L - l3 * S - l4 * U        (Eq 5)

- C, compactness: `1 / (1 + v / v0)`, with v the variance of prompt lengths inside their queue, in tokens
  squared, averaged over requests, and v0 a million, a spread of 1,000 tokens. 0 to 1.
- L, load balance: `1 / (1 + CV)`, with CV the coefficient of variation of the number of requests per queue.
  0 to 1.
- S, queue proliferation: queues that received requests, over 32. From near 0 up; 1 at the limit.
- U, latency: mean queue time over 10 s. From 0 up, unbounded.

The weights 1, 1, 0.5, 1 and the forms of C, L, S and U are those of secondary readings. Averaging v over
requests is this project's choice: the sources name the variance only. Queues are distinguished by the name
under which a request was dispatched, so the partition should not change within the interval.

A service class is a priority class and a prompt size. Size is included because clients accept later responses
to long prompts, and because the method trades short requests against long ones, which a combined value would
hide.

Outcomes of requests since the tuner's last pull: lengths, classes, tenants and times, no text.

They are recorded from events and commands only, so they cost the scheduler one dictionary entry per request.
Losing them is harmless: without a tuner, new outcomes replace old ones. Requests rejected on arrival are
missing, because they are retried with other ids, and so are those that an earlier scheduler admitted.
"""

import math
import statistics
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Literal

from serve_app.core.commands import Command, Conclude, Dispatch
from serve_app.core.events import Event, Finished, FirstToken
from serve_app.core.metrics.record import RequestRecord
from serve_app.core.metrics.summary import ClassTargets, jain_of_tenants, percentile
from serve_app.core.request import ScheduledRequest
from serve_app.core.settings_base import at_least, settings
from serve_app.errors import Outcome
from serve_app.request import PriorityClass

_KEPT = 10_000
"""Maximum number of outcomes between two pulls: ten seconds at 1,000 requests/s; about 3 MB."""

# Age of an open request from which the outcomes since its arrival count as complete.
_OLDEST_S = 60.0
# Lookup by value, because calling an enum takes five times as long and there is a row per request.
_OUTCOMES = {outcome.value: outcome for outcome in Outcome}
_CLASSES = {priority.value: priority for priority in PriorityClass}

# Fields in the order of `_row`. Tuples are cheaper to send between actors than objects.
Row = tuple[str, float, float | None, float | None, float, str, int, int, str, str, str, str, str]


@dataclass(slots=True)
class _Open:
    """A request that has not ended."""

    arrived_at: float
    prompt_tokens: int
    tenant: str
    priority: PriorityClass
    pool: str = ""
    replica: str = ""
    length_queue: str = ""
    dispatched_at: float | None = None
    first_token_at: float | None = None


class OutcomeWindow:
    """Outcomes of one scheduler since the last pull."""

    def __init__(self) -> None:
        self._open: dict[str, _Open] = {}
        self._rows: deque[Row] = deque(maxlen=_KEPT)

    def on_arrival(self, scheduled: ScheduledRequest) -> None:
        """Record an admitted request."""
        request = scheduled.request
        self._open[request.request_id] = _Open(
            arrived_at=request.arrived_at,
            prompt_tokens=scheduled.estimate.expected_prompt_tokens,
            tenant=request.tenant,
            priority=request.priority,
        )

    def on_event(self, event: Event, commands: list[Command], now: float) -> None:
        """Record an event that the scheduler has handled, with its commands."""
        if isinstance(event, FirstToken):
            started = self._open.get(event.request_id)
            if started is not None and started.first_token_at is None:
                started.first_token_at = now
        for command in commands:
            if isinstance(command, Dispatch):
                sent = self._open.get(command.request_id)
                if sent is not None:
                    # A request that is dispatched again after the loss of a replica has a new first token.
                    sent.dispatched_at, sent.first_token_at = now, None
                    sent.pool, sent.replica = command.pool, command.replica_id
                    sent.length_queue = command.length_queue
            elif isinstance(command, Conclude):
                over = self._open.pop(command.request_id, None)
                if over is not None:
                    self._rows.append(_row(command, over, event, now))

    def completed_until(self, now: float) -> float:
        """Return the arrival of the oldest request that has not ended, or `now` if there is none.

        Batch work may wait for hours, and an answer may take an hour. Neither delays a judgement.
        """
        arrivals = (
            each.arrived_at for each in self._open.values() if each.priority is not PriorityClass.BATCH
        )
        return max(min(arrivals, default=now), now - _OLDEST_S)

    def take(self) -> list[Row]:
        """Return and remove all outcomes since the last call, in order."""
        rows = list(self._rows)
        self._rows.clear()
        return rows

    def __len__(self) -> int:
        return len(self._rows)

    def __repr__(self) -> str:
        return f"<OutcomeWindow {len(self._rows)} outcomes, {len(self._open)} open requests>"


def _row(command: Conclude, over: _Open, event: Event, now: float) -> Row:
    prompt_tokens, output_tokens = over.prompt_tokens, 0
    if isinstance(event, Finished) and event.request_id == command.request_id and event.usage is not None:
        prompt_tokens, output_tokens = event.usage.prompt_tokens, event.usage.output_tokens
    return (
        command.request_id,
        over.arrived_at,
        over.dispatched_at,
        over.first_token_at,
        now,
        command.conclusion.outcome.value,
        prompt_tokens,
        output_tokens,
        over.tenant,
        over.priority.value,
        over.pool,
        over.replica,
        over.length_queue,
    )


def record_of(row: Row) -> RequestRecord:
    """Return the record of a row, with times on the scheduler's clock."""
    request_id, arrived_at, dispatched_at, first_token_at, finished_at, outcome = row[:6]
    prompt_tokens, output_tokens, tenant, priority, pool, replica, length_queue = row[6:]
    return RequestRecord(
        request_id=request_id,
        arrived_at=arrived_at,
        dispatched_at=dispatched_at,
        first_token_at=first_token_at,
        finished_at=finished_at,
        outcome=_OUTCOMES[outcome],
        prompt_tokens=prompt_tokens,
        output_tokens=output_tokens,
        tenant=tenant,
        priority=_CLASSES[priority],
        pool=pool,
        replica=replica,
        length_queue=length_queue,
    )


# A p99 that grows from its target to three times that costs as much as 1 request of 16 out of its SLO.
# Halving every time to first token from its target is worth 4 requests of 100. If one of two tenants gets all
# service, that costs as much as 1 request of 8.
_SLO_WEIGHTS = {"attainment": 1.0, "tail": -0.25, "slowness": -0.25, "unfairness": -0.25}
_PAPER_WEIGHTS = {"compactness": 1.0, "balance": 1.0, "proliferation": -0.5, "latency": -1.0}
_VARIANCE_SCALE, _MAX_QUEUES, _WAIT_SCALE_S = 1e6, 32, 10.0
_MIN_CLASS_REQUESTS = 20
"""Smaller classes have no meaningful p99: that of 20 requests is almost their maximum."""
_MIN_MEASURED_RATIO = 0.5
"""Minimum share of completed requests with a time to first token. Responses that are not streamed have none,
and if most have none, the others do not represent the traffic."""

ObjectiveKind = Literal["slo", "paper"]


@settings
class ObjectiveSettings:
    """Objective of the tuner.

    Attributes:
        kind: the reward function.
        targets: limits by class; both rewards report attainment, but only `slo` depends on it.
        min_requests: minimum number of requests; a share of 30 requests is uncertain by a tenth or two.
    """

    kind: ObjectiveKind = "slo"
    targets: ClassTargets = field(default_factory=ClassTargets)
    min_requests: Annotated[int, at_least(1)] = 30


@dataclass(frozen=True, slots=True, kw_only=True)
class Reward:
    """Reward of an interval.

    Attributes:
        value: higher is better; None if it could not be measured.
        terms: unweighted terms by name.
        requests: number of judged requests.
        reason: why there is no value; empty if there is one.
    """

    value: float | None
    terms: Mapping[str, float] = field(default_factory=dict)
    requests: int = 0
    reason: str = ""


def finite(reward: float | None) -> float | None:
    """Return the reward, or None if it is not finite, as from a broken objective."""
    return reward if reward is not None and math.isfinite(reward) else None


def reward_of(records: Sequence[RequestRecord], settings: ObjectiveSettings) -> Reward:
    """Return the reward of an interval, given each request that arrived in it once, in any order."""
    targets = settings.targets
    # Excludes client errors, and completed requests without a known first token. A cancelled request counts
    # if it had waited longer than its limit for a first token.
    judged = [
        record
        for record in records
        if targets.is_attributable(record) and (record.ttft_s is not None or not record.completed)
    ]
    reason = _why_unmeasured(records, judged, settings)
    if reason:
        return Reward(value=None, requests=len(judged), reason=reason)
    if settings.kind == "paper":
        terms, weights = _paper_terms(judged), _PAPER_WEIGHTS
    else:
        terms, weights = _slo_terms(judged, targets), _SLO_WEIGHTS
    value = finite(sum(weight * terms[name] for name, weight in weights.items()))
    reason = "the reward is not finite" if value is None else ""
    return Reward(value=value, terms=terms, requests=len(judged), reason=reason)


def _why_unmeasured(
    records: Sequence[RequestRecord], judged: Sequence[RequestRecord], settings: ObjectiveSettings
) -> str:
    """Return why these requests have no reward; empty if they have one."""
    if len(judged) < settings.min_requests:
        return f"{len(judged)} requests can be evaluated, {settings.min_requests} are needed"
    completed = sum(record.completed for record in records)
    measured_ratio = sum(record.completed for record in judged) / completed if completed else 1.0
    if measured_ratio < _MIN_MEASURED_RATIO:
        return f"only {measured_ratio:.0%} of the completed requests have a time to first token"
    sent = [record for record in judged if record.dispatched_at is not None]
    # Without names there would seem to be no queues at all, which is optimal under the paper's objective.
    if settings.kind == "paper" and sum(not record.length_queue for record in sent) > len(sent) / 2:
        return "most requests have no length queue"
    return ""


def _slo_terms(judged: Sequence[RequestRecord], targets: ClassTargets) -> dict[str, float]:
    late: dict[str, list[float]] = {}
    for record in judged:
        late.setdefault(targets.class_of(record), []).append(targets.lateness(record))
    large = [sorted(each) for each in late.values() if len(each) >= _MIN_CLASS_REQUESTS] or [
        sorted(value for each in late.values() for value in each)
    ]
    jain = jain_of_tenants(judged)
    return {
        "attainment": sum(map(targets.met_by, judged)) / len(judged),
        "tail": max(percentile(each, 99) for each in large),
        "slowness": statistics.fmean(statistics.fmean(each) for each in large),
        # Without any service, nothing is unfair.
        "unfairness": 0.0 if jain is None else 1.0 - jain,
    }


def _paper_terms(judged: Sequence[RequestRecord]) -> dict[str, float]:
    """Return C, L, S and U. A request that was never dispatched waited until its end and is in no queue."""
    queues: dict[str, list[int]] = {}
    for record in judged:
        if record.length_queue:
            queues.setdefault(record.length_queue, []).append(record.prompt_tokens)
    sizes = [len(members) for members in queues.values()]
    # Weighted by requests, because otherwise a queue of 3 would count as much as one of 1,000.
    squares = sum(len(lengths) * statistics.pvariance(lengths) for lengths in queues.values())
    variance = squares / sum(sizes) if sizes else 0.0
    variation = statistics.pstdev(sizes) / statistics.fmean(sizes) if sizes else 0.0
    wait_s = statistics.fmean(
        record.e2e_s if record.queue_wait_s is None else record.queue_wait_s for record in judged
    )
    return {
        "compactness": 1 / (1 + variance / _VARIANCE_SCALE),
        "balance": 1 / (1 + variation),
        "proliferation": len(queues) / _MAX_QUEUES,
        "latency": wait_s / _WAIT_SCALE_S,
    }
