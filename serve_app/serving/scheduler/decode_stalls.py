"""Decode stalls: the longest gap between two pieces of each streamed answer, and its cause.

A gateway measures the gap and reports it with the end of the request. The scheduler knows which prefills its
replica computed at the time. Clocks are not compared: the gap's end is an age.

| cause      | meaning                                                                                  |
|------------|------------------------------------------------------------------------------------------|
| `prefill`  | a prefill was in flight beside it on its replica; the one with the most tokens counts    |
| `kv_cache` | no prefill, and the replica last reported a full KV cache: engines then preempt requests |
| `other`    | neither: a pause of the engine, the network, or work that this scheduler did not send    |
"""

import math
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from serve_app.core.commands import Conclude, Dispatch
from serve_app.core.events import DispatchFailed, Finished, FirstToken, ReplicaLost
from serve_app.core.request import ScheduledRequest
from serve_app.serving.metric_cells import Cells, HistogramCell
from serve_app.serving.scheduler.history import RequestHistory, Stall, StallCause
from serve_app.serving.scheduler.journal import Entry

# Prefills that are remembered for each replica: about a second of short ones. Those of long prompts, which
# cause stalls, are fewer.
_REMEMBERED = 128
_FULL = 0.95
# Least share of a gap during which a prefill must have been in flight: messages take some milliseconds.
_LEAST_OVERLAP = 0.1


class _Prefill(NamedTuple):
    request_id: str
    began_at: float
    ended_at: float
    tokens: int


@dataclass(slots=True)
class _Prefills:
    """Prefills of one replica: those in flight by request, and the last that have ended."""

    open: dict[str, _Prefill] = field(default_factory=dict)
    ended: deque[_Prefill] = field(default_factory=lambda: deque(maxlen=_REMEMBERED))


class DecodeStalls:
    """Observer of dispatches, first tokens and ends.

    Args:
        gaps: histogram by model, pool and cause.
    """

    def __init__(self, model: str, history: RequestHistory, gaps: Cells[HistogramCell]) -> None:
        self._model = model
        self._history = history
        self._gaps = gaps
        self._replicas: dict[str, _Prefills] = {}

    def handlers(self) -> Mapping[type, Callable[..., None]]:
        """Return the handlers of what begins and ends a prefill, and of the ends of requests."""
        return {
            Dispatch: self._on_dispatch,
            FirstToken: self._on_first_token,
            DispatchFailed: lambda entry: self._end(entry.event.replica_id, entry.event.request_id, None),
            ReplicaLost: self._on_loss,
            Conclude: self._on_conclusion,
        }

    def _on_loss(self, entry: Entry) -> None:
        assert isinstance(entry.event, ReplicaLost)
        self._replicas.pop(entry.event.replica_id, None)

    def _on_dispatch(self, entry: Entry, command: Dispatch, scheduled: ScheduledRequest) -> None:
        prefills = self._replicas.setdefault(command.replica_id, _Prefills())
        prefills.open[command.request_id] = _Prefill(
            command.request_id, entry.now, math.inf, scheduled.prefill_tokens
        )

    def _on_first_token(self, entry: Entry) -> None:
        scheduled = entry.scheduled
        if scheduled is not None and scheduled.replica_id is not None:
            self._end(scheduled.replica_id, scheduled.request.request_id, entry.now)

    def _end(self, replica_id: str, request_id: str, ended_at: float | None) -> None:
        """End a prefill; without a time, it is forgotten."""
        prefills = self._replicas.get(replica_id)
        known = None if prefills is None else prefills.open.pop(request_id, None)
        if prefills is not None and known is not None and ended_at is not None:
            prefills.ended.append(known._replace(ended_at=ended_at))

    def _on_conclusion(self, entry: Entry, command: Conclude, scheduled: ScheduledRequest) -> None:
        dispatch, event = scheduled.dispatch, entry.event
        if dispatch is None:
            return
        # An answer that is not streamed ends with its first token.
        self._end(dispatch.replica_id, command.request_id, entry.now)
        if not isinstance(event, Finished) or event.gap is None:
            return
        ended_at = entry.now - event.gap.ended_ago_s
        stall = self._stall(entry, scheduled, dispatch.replica_id, event.gap.seconds, ended_at)
        self._gaps[self._model, dispatch.pool, stall.cause].observe(stall.seconds)
        if (known := self._history.find(command.request_id)) is not None:
            known.stall = stall

    def _stall(
        self, entry: Entry, scheduled: ScheduledRequest, replica_id: str, seconds: float, ended_at: float
    ) -> Stall:
        prefills, own_id = self._replicas.get(replica_id) or _Prefills(), scheduled.request.request_id
        least_s, began_at = _LEAST_OVERLAP * seconds, ended_at - seconds
        beside = [
            each.tokens
            for each in (*prefills.open.values(), *prefills.ended)
            if min(each.ended_at, ended_at) - max(each.began_at, began_at) >= least_s
            and each.request_id != own_id
        ]
        if beside:
            return Stall(seconds, StallCause.PREFILL, max(beside))
        replica = entry.core.ledger.get(replica_id)
        report = None if replica is None else replica.report
        is_full = report is not None and (report.kv_usage_ratio or 0.0) >= _FULL
        return Stall(seconds, StallCause.KV_CACHE if is_full else StallCause.OTHER)
