"""What arrived lately, and what else might have: real traffic, and windows drawn from it.

`TrafficLog` keeps lengths, classes, tenants and times of requests that are over; no text. `resampled` draws
a window from them by the block bootstrap: blocks of consecutive requests, with the gaps between them, put one
after the other. Inside a block bursts, and which lengths come together, stay as they were; what is longer
than a block is mixed. A window of one seed and number is the same for every candidate (common random
numbers), so that two candidates differ by what they do and not by what they met.

Source of the block bootstrap: Kuensch, The Jackknife and the Bootstrap for General Stationary Observations
(Annals of Statistics, 1989); blocks wrap around the end, so that each request is drawn as often as any other.
"""

import bisect
from collections import deque
from dataclasses import replace

import numpy as np

from serve_app.metrics.record import RequestRecord
from serve_app.tuning.objective.service_class import NOT_OURS
from serve_app.workloads.streams import stream
from serve_app.workloads.trace import Trace, TraceRequest

DEFAULT_SPAN_S = 600.0
"""Ten minutes: long enough for a mix of tenants, short enough to be the present."""
DEFAULT_CAPACITY = 20_000
"""At most so many requests, some 4 MB: ten minutes at 33 requests/s."""


class TrafficLog:
    """The requests of the last minutes.

    Args:
        span_s: requests that arrived longer before the latest one are forgotten.
        capacity: more requests than that are not kept, whatever the span.
    """

    def __init__(self, *, span_s: float = DEFAULT_SPAN_S, capacity: int = DEFAULT_CAPACITY) -> None:
        if not span_s > 0 or capacity < 1:
            raise ValueError(f"span_s must be positive and capacity at least 1, got {span_s} and {capacity}")
        self._span_s = span_s
        self._records: deque[RequestRecord] = deque(maxlen=capacity)

    def __len__(self) -> int:
        return len(self._records)

    def __repr__(self) -> str:
        return f"<TrafficLog {len(self)} requests>"

    def add(self, record: RequestRecord) -> None:
        """Take in a request that is over; one that no engine would have taken is no traffic."""
        if record.outcome not in NOT_OURS and record.prompt_tokens >= 1:
            self._records.append(record)

    def between(self, start: float, end: float) -> list[RequestRecord]:
        """The requests that arrived in a stretch of time, `end` not included."""
        return [record for record in self._records if start <= record.arrived_at < end]

    def recent(self, until: float) -> list[RequestRecord]:
        """The requests of the span that ends with the last arrival before `until`, by arrival."""
        records = [record for record in self._records if record.arrived_at < until]
        latest = max((record.arrived_at for record in records), default=0.0)
        return sorted(
            (record for record in records if record.arrived_at >= latest - self._span_s),
            key=_by_arrival,
        )

    def trace(self, until: float) -> Trace | None:
        """The requests that arrived before `until` as a trace that begins at 0; None when there are none.

        Answers that never came to their end get the length of one that did, whose prompt is of about the same
        length: nobody knows how long they would have become.

        Args:
            until: when the oldest request came that is not over yet, on the clock of the records. After it,
                only those are known that were served quickly, which is no sample of what came.
        """
        kept = self.recent(until)
        return _trace(kept, kept[0].arrived_at) if kept else None

    def stretch(self, start: float, end: float) -> Trace | None:
        """The requests that arrived in a stretch of time as a trace in which `start` is 0.

        None when there are none, and when some of them may be forgotten already.
        """
        is_whole = len(self._records) < (self._records.maxlen or 0)
        if not is_whole and start < min(record.arrived_at for record in self._records):
            return None
        came = sorted(self.between(start, end), key=_by_arrival)
        return _trace(came, start) if came else None


def _by_arrival(record: RequestRecord) -> tuple[float, str]:
    return record.arrived_at, record.request_id


def _trace(records: list[RequestRecord], start: float) -> Trace:
    """A trace of them in which `start` is 0."""
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
    return Trace(name="live", source=f"{len(records):,} requests as they came", requests=requests)


class _RecordedOutputs:
    """How long is an answer? As it was, or as that to the nearest prompt of those that completed."""

    def __init__(self, records: list[RequestRecord]) -> None:
        self._known = sorted(
            (record.prompt_tokens, max(1, record.output_tokens)) for record in records if record.completed
        )

    def of(self, record: RequestRecord) -> int:
        if record.completed:
            return max(1, record.output_tokens)
        if not self._known:
            return max(1, record.output_tokens)
        place = bisect.bisect_left(self._known, (record.prompt_tokens, 0))
        _, output = min(
            self._known[max(0, place - 1) : place + 1], key=lambda known: abs(known[0] - record.prompt_tokens)
        )
        return max(output, record.output_tokens)


def resampled(traffic: Trace, requests: int, block: int, *, seed: int, number: int) -> Trace:
    """Window `number` of a seed: so many requests, drawn in blocks.

    Args:
        block: requests in a block; a shorter trace is one block.
    """
    have = len(traffic.requests)
    rng = stream(seed, f"window {number}")
    block = min(block, have)
    starts = rng.integers(have, size=-(-requests // block))
    places = (starts[:, None] + np.arange(block)[None, :]).ravel()[:requests] % have
    arrivals = np.array([one.arrival_s for one in traffic.requests])
    mean_gap = traffic.span_s / max(1, have - 1)
    # Before the first request lies no gap that is known.
    gaps = np.diff(arrivals, prepend=arrivals[0] - mean_gap)
    times = np.cumsum(gaps[places])
    times -= times[0]
    drawn = tuple(
        replace(traffic.requests[int(place)], arrival_s=float(at))
        for place, at in zip(places, times, strict=True)
    )
    return replace(traffic, requests=drawn, source=f"{traffic.source}, window {number} of seed {seed}")
