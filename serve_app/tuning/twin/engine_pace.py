"""The pace of real engines against their model, measured by replaying the dispatches that they received.

The time per output token grows with the batch, and the batch with the backlog. So an engine under a backlog
looks twice as slow as the same engine in a twin that begins empty. Therefore the model is not given the
traffic but the *dispatches*: each engine's requests at the times at which it got them. If the engines are as
fast as their model, the batches are the same, and so is the median TPOT. If not, the model's step times are
scaled until it is.

Two assumptions: the engine serves in the same order as the model, and there are no prefix cache hits.
"""

import math
import statistics
from collections.abc import Callable, Sequence

from serve_app.engine_model.model import StepOutcome
from serve_app.engine_model.sequences import EngineSequence
from serve_app.metrics.record import RequestRecord
from serve_app.simulation.replica import ReplicaPlan, SimulatedReplica
from serve_app.simulation.timeline import Rank, Timeline
from serve_app.tuning.twin.digital_twin import with_speed

SLOWEST, FASTEST = 0.25, 4.0
"""A factor beyond these means a measurement error or the wrong profile, which scaling cannot correct."""

_REPLAYED = 900
"""Requests that are replayed: enough for a median within a few percent, and a second of work."""
_WARM_UP_RATIO = 1 / 3
"""Share of these, the first by dispatch, that is not measured: the real engines were busy at the start."""
_TOLERANCE = 0.03
_ATTEMPTS = 7


def engine_pace(
    records: Sequence[RequestRecord],
    engines: Sequence[ReplicaPlan],
    until: float = math.inf,
    rest: Callable[[], object] = lambda: None,
) -> float | None:
    """The factor for `digital_twin.with_speed`: 2 for engines that take twice as long as their model.

    Args:
        records: all requests dispatched in some interval before `until`, in any order. Those of other
            replicas are left out.
        engines: those of the profile, with the replica ids of the records.
        until: arrival of the oldest request that is still open. A request that was answered by then shared
            its engine with recorded requests only.
        rest: called after each replay; there are at most seven.

    Returns:
        The factor, kept within 0.25 and 4; None when no completed request has a TPOT.
    """
    sent = _sent(records, engines, until)
    real = {
        each.request_id: each.tpot_s
        for each in sent[round(_WARM_UP_RATIO * len(sent)) :]
        if each.completed and each.tpot_s is not None and each.finished_at <= until
    }
    if not real or not statistics.median(real.values()) > 0:
        return None

    def excess(factor: float) -> float:
        """Logarithm of the model's median TPOT over the real one; grows with the factor."""
        paces = _replayed(sent, with_speed(engines, factor))
        rest()
        return math.log(statistics.median(paces[each] for each in real) / statistics.median(real.values()))

    return _root(excess)


def _root(excess: Callable[[float], float]) -> float:
    """The factor at which a growing function is 0, to a few percent, within the bounds.

    The Illinois variant of the false position method, in the logarithm of the factor: an end that stays gets
    half its weight, so that the other end moves.
    """
    at_one = excess(1.0)
    if abs(at_one) <= _TOLERANCE:
        return 1.0
    end = FASTEST if at_one < 0 else SLOWEST
    at_end = excess(end)
    if at_end * at_one > 0:
        return end
    (left, at_left), (right, at_right) = (0.0, at_one), (math.log(end), at_end)
    middle = left
    for _ in range(_ATTEMPTS - 2):
        middle = (left * at_right - right * at_left) / (at_right - at_left)
        found = excess(math.exp(middle))
        if abs(found) <= _TOLERANCE:
            break
        if found * at_right < 0:
            left, at_left = right, at_right
        else:
            at_left /= 2
        right, at_right = middle, found
    return math.exp(middle)


def _sent(
    records: Sequence[RequestRecord], engines: Sequence[ReplicaPlan], until: float
) -> list[RequestRecord]:
    """The last requests that were dispatched to these engines and fit them, in the order of dispatch."""
    limits = {engine.replica_id: engine.engine.max_model_len for engine in engines}
    sent = sorted(
        (
            (each.dispatched_at, each.request_id, each)
            for each in records
            if each.dispatched_at is not None
            and each.dispatched_at < until
            and 0 < each.prompt_tokens <= limits.get(each.replica, 0) - max(1, each.output_tokens)
        ),
        key=lambda one: one[:2],
    )
    return [record for _, _, record in sent[-_REPLAYED:]]


def _replayed(sent: Sequence[RequestRecord], engines: Sequence[ReplicaPlan]) -> dict[str, float]:
    """The TPOT of each request on engines that get it when the real ones did; 0 for a single token."""
    timeline, paces = Timeline(), dict[str, float]()

    def on_step_end(outcome: StepOutcome) -> None:
        for one in outcome.finished:
            assert one.first_token_at is not None
            assert one.finished_at is not None
            paces[one.sequence_id] = (one.finished_at - one.first_token_at) / max(1, one.target_tokens - 1)

    replicas = {engine.replica_id: SimulatedReplica(engine, timeline, on_step_end) for engine in engines}
    begin = sent[0].dispatched_at or 0.0
    for record in sent:
        at = (record.dispatched_at or 0.0) - begin

        def accept(record: RequestRecord = record, at: float = at) -> None:
            output_tokens = max(1, record.output_tokens)
            replicas[record.replica].accept(
                EngineSequence(record.request_id, record.prompt_tokens, output_tokens, at)
            )

        timeline.at(at, Rank.FEEDBACK, accept)
    timeline.run()
    return paces
