"""Recent traffic, and windows drawn from it.

`TrafficLog` stores lengths, classes, tenants and times of requests that have ended, and no text. `resampled`
draws a window from a trace by the block bootstrap: it concatenates blocks of consecutive requests with their
gaps. Bursts and length patterns shorter than a block are preserved; longer ones are mixed. A window of one
seed and number is the same for every candidate (common random numbers), so candidates differ only by their
settings.

Source of the block bootstrap: Kuensch, The Jackknife and the Bootstrap for General Stationary Observations
(Annals of Statistics, 1989); blocks wrap around the end, so that each request is drawn with equal
probability.
"""

import bisect
from collections import deque
from dataclasses import replace

import numpy as np

from serve_app.core.metrics.record import RequestRecord
from serve_app.core.metrics.targets import NOT_ATTRIBUTABLE
from serve_app.lab.workloads.catalog import stream
from serve_app.lab.workloads.trace import Trace, TraceRequest

# Maximum age relative to the latest arrival: ten minutes are long enough for a mix of tenants, and short
# enough to be current.
_SPAN_S = 600.0
# Maximum number of requests, some 4 MB: ten minutes at 33 requests/s.
_CAPACITY = 20_000


class TrafficLog:
    """Requests of the last ten minutes."""

    def __init__(self) -> None:
        self._records: deque[RequestRecord] = deque(maxlen=_CAPACITY)

    def __len__(self) -> int:
        return len(self._records)

    def __repr__(self) -> str:
        return f"<TrafficLog {len(self)} requests>"

    def add(self, record: RequestRecord) -> None:
        """Add a request that has ended, unless it was rejected for a client error."""
        if record.outcome not in NOT_ATTRIBUTABLE and record.prompt_tokens >= 1:
            self._records.append(record)

    def recent(self, until: float) -> list[RequestRecord]:
        """Return the requests of the span up to the last arrival before `until`, by arrival."""
        records = [record for record in self._records if record.arrived_at < until]
        latest = max((record.arrived_at for record in records), default=0.0)
        return sorted(
            (record for record in records if record.arrived_at >= latest - _SPAN_S),
            key=_by_arrival,
        )

    def trace(self, until: float) -> Trace | None:
        """Return the requests that arrived before `until` as a trace that begins at 0; None without any.

        The unknown length of a response that did not complete is replaced by that of a completed one with
        about the same prompt length.

        Args:
            until: arrival of the oldest request that has not ended, on the clock of the records. Of later
                arrivals only the quickly served ones are known, which do not represent the traffic.
        """
        kept = self.recent(until)
        return _trace(kept, kept[0].arrived_at) if kept else None


def _by_arrival(record: RequestRecord) -> tuple[float, str]:
    return record.arrived_at, record.request_id


def _trace(records: list[RequestRecord], start: float) -> Trace:
    """Return a trace of these requests in which `start` is 0."""
    outputs = _RecordedOutputs(records)
    requests = tuple(
        TraceRequest(
            arrival_s=record.arrived_at - start,
            prompt_tokens=record.prompt_tokens,
            output_tokens=outputs.of(record),
            tenant=record.tenant,
            priority=record.priority,
        )
        for record in records
    )
    return Trace(name="live", source=f"{len(records):,} recorded requests", requests=requests)


class _RecordedOutputs:
    """Output lengths: as recorded, or that of the completed request with the nearest prompt length."""

    def __init__(self, records: list[RequestRecord]) -> None:
        self._known = sorted(
            (record.prompt_tokens, max(1, record.output_tokens)) for record in records if record.completed
        )

    def of(self, record: RequestRecord) -> int:
        if record.completed or not self._known:
            return max(1, record.output_tokens)
        place = bisect.bisect_left(self._known, (record.prompt_tokens, 0))
        _, output = min(
            self._known[max(0, place - 1) : place + 1], key=lambda known: abs(known[0] - record.prompt_tokens)
        )
        return max(output, record.output_tokens)


def resampled(traffic: Trace, requests: int, block: int, *, seed: int, number: int) -> Trace:
    """Return window `number` of a seed, drawn in blocks of `block` requests; a shorter trace is one block."""
    have = len(traffic.requests)
    rng = stream(seed, f"window {number}")
    block = min(block, have)
    starts = rng.integers(have, size=-(-requests // block))
    places = (starts[:, None] + np.arange(block)[None, :]).ravel()[:requests] % have
    arrivals = np.array([one.arrival_s for one in traffic.requests])
    mean_gap = traffic.span_s / max(1, have - 1)
    # The gap before the first request is unknown, so use the mean.
    gaps = np.diff(arrivals, prepend=arrivals[0] - mean_gap)
    times = np.cumsum(gaps[places])
    times -= times[0]
    drawn = tuple(
        replace(traffic.requests[int(place)], arrival_s=float(at))
        for place, at in zip(places, times, strict=True)
    )
    return replace(traffic, requests=drawn, source=f"{traffic.source}, window {number} of seed {seed}")
