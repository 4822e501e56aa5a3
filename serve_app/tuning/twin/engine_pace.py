"""By how much are the engines slower than their model? Asked by sending the model what they were sent.

The time per output token grows with the batch, and the batch with whatever waits: an engine under a backlog
looks twice as slow as the same engine in a twin that begins empty. So the model is not given the traffic but
the *dispatches*: each engine's requests at the times at which it got them. If the engines are as fast as
their model, batches are the same, and so is the median TPOT; if not, the model's pace is scaled until it is.

What it takes for granted: an order of service within the engine as in the model, and no prefix cache hits.
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
"""A factor beyond these is a mistake of measurement or the wrong profile; neither is put right by scaling."""

_REPLAYED = 900
"""Requests that are sent again: enough for a median within a few percent, and a second of work."""
_WARM_UP_RATIO = 1 / 3
"""Of these, the first that are not measured: the real engines were busy when the first of them came."""
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
        records: all that were dispatched in some stretch of time before `until`, in any order. Those of
            replicas that are not among the engines are left out.
        engines: those of the profile, under the names that the records have.
        until: when the oldest request arrived that is not over yet. What was answered by then shared its
            engine with none that there is no record of.
        rest: called after each replay; there are at most seven.

    Returns:
        The factor, kept within 0.25 and 4; None when nothing that was completed has a TPOT.
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
        """Logarithm of the model's median over the real one; grows with the factor."""
        paces = _replayed(sent, with_speed(engines, factor))
        rest()
        return math.log(statistics.median(paces[each] for each in real) / statistics.median(real.values()))

    return _root(excess)


def _root(excess: Callable[[float], float]) -> float:
    """Where a growing function is 0, to a few percent: secants within bounds, in the logarithm of the factor.

    The Illinois variant of the false position: an end that stays is given half its weight, so that the other
    one moves.
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
    """The last that were dispatched to these engines and fit them, in that order."""
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
    """The TPOT of each request, from engines that get them when the real ones did; 0 of a single token."""
    timeline, paces = Timeline(), dict[str, float]()

    def ended(outcome: StepOutcome) -> None:
        for one in outcome.finished:
            assert one.first_token_at is not None
            assert one.finished_at is not None
            paces[one.sequence_id] = (one.finished_at - one.first_token_at) / max(1, one.target_tokens - 1)

    replicas = {engine.replica_id: SimulatedReplica(engine, timeline, ended) for engine in engines}
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
