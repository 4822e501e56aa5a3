"""Recording: the requests of the last minutes as the scheduler recorded them, and their figures."""

import itertools
import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from serve_app.cli.application import ApplicationError
from serve_app.core.metrics.record import RequestRecord
from serve_app.core.metrics.summary import Distribution
from serve_app.errors import Outcome, ServeAppError
from serve_app.request import PriorityClass
from serve_app.serving.scheduler.history import MAX_ENDED

# Tenants with figures of their own.
_TENANTS = 5
# Parts of the window whose spread gives the interval of a comparison.
_BLOCKS = 10

Document = dict[str, Any]


class ReportError(ServeAppError):
    """There are too few requests to report."""


@dataclass(frozen=True, slots=True)
class Recording:
    """The requests that arrived in one window and have ended, by arrival; times are in Unix seconds.

    Attributes:
        lines: as in `captured_in_full`.
        records: one for each of the lines.
        start, until: the window. No request that arrived in it is open.
    """

    lines: Sequence[Mapping[str, Any]]
    records: Sequence[RequestRecord]
    start: float
    until: float


def recording_of(lines: Sequence[Mapping[str, Any]], minutes: float, since: float) -> Recording:
    """Return the last minutes of a full capture.

    Args:
        since: earliest start, such as the last change of the mode.

    Raises:
        ApplicationError: the lines have no outcomes.
        ReportError: no request of the window has ended.
    """
    if any("outcome" not in line for line in lines):
        raise ApplicationError(
            "the application is of an older release, whose capture has no times: update it"
        )
    ended = [line for line in lines if line["outcome"] is not None]
    ends = [line["arrived_at"] + line["total_s"] for line in ended]
    latest = max(ends, default=0.0)
    start = max(latest - 60 * minutes, since)
    if len(ended) >= MAX_ENDED:
        # Of requests that arrived earlier, only those that took long are still known.
        start = max(start, min(ends))
    until = min((line["arrived_at"] for line in lines if line["outcome"] is None), default=math.inf)
    inside = [line for line in ended if start <= line["arrived_at"] < until]
    if not inside:
        raise ReportError(
            "no request has arrived and ended since the last change of the mode: wait some minutes"
        )
    records = [_record(number, line) for number, line in enumerate(inside)]
    return Recording(inside, records, inside[0]["arrived_at"], min(until, math.nextafter(latest, math.inf)))


def _record(number: int, line: Mapping[str, Any]) -> RequestRecord:
    arrived_at, queue_s, ttft_s = line["arrived_at"], line["queue_s"], line["ttft_s"]
    return RequestRecord(
        request_id=f"r{number}",
        arrived_at=arrived_at,
        dispatched_at=arrived_at + queue_s if line["replica"] and queue_s is not None else None,
        first_token_at=None if ttft_s is None else arrived_at + ttft_s,
        finished_at=arrived_at + line["total_s"],
        outcome=Outcome(line["outcome"]),
        prompt_tokens=line["input_length"],
        output_tokens=line["output_length"],
        tenant=line["tenant"],
        priority=PriorityClass(line["priority"]),
        pool=line["pool"],
        replica=line["replica"],
    )


Selection = Callable[[RequestRecord], bool]


def groups_of(records: Sequence[RequestRecord], short_at: int) -> dict[str, Selection]:
    """Return short and long prompts without batch work, and classes and large tenants if there are several.

    Batch work waits for capacity that other requests leave, so it is always a separate group.
    """
    groups: dict[str, Selection] = {
        "short": lambda record: record.prompt_tokens <= short_at and not is_batch(record),
        "long": lambda record: record.prompt_tokens > short_at and not is_batch(record),
    }
    tenants: Counter[str] = Counter()
    for record in records:
        tenants[record.tenant] += record.prompt_tokens + record.output_tokens
    classes = sorted({record.priority.value for record in records})
    for field, names in (
        ("priority", classes),
        ("tenant", [name for name, _ in tenants.most_common(_TENANTS)]),
    ):
        if len(names) > 1 or names == classes == [PriorityClass.BATCH]:
            groups |= {f"{field} {name}": partial(_has, field, name) for name in names}
    return groups


def is_batch(record: RequestRecord) -> bool:
    """Return whether a request is batch work."""
    return record.priority is PriorityClass.BATCH


def _has(field: str, value: str, record: RequestRecord) -> bool:
    return bool(getattr(record, field) == value)


def figures(chosen: Iterable[RequestRecord]) -> Document:
    """Return the figures of requests; latencies are of completed and streamed ones."""
    records = list(chosen)
    done = [record for record in records if record.completed]
    ttft = Distribution.of(record.ttft_s for record in done if record.ttft_s is not None)
    tpot = Distribution.of(record.tpot_s for record in done if record.tpot_s is not None)
    return {
        "requests": len(records),
        "tokens": sum(record.prompt_tokens + record.output_tokens for record in done),
        "ttft_mean_s": ttft.mean,
        "ttft_p95_s": ttft.p95,
        "ttft_p99_s": ttft.p99,
        "tpot_mean_s": tpot.mean,
        "not_completed_ratio": 1 - len(done) / len(records) if records else None,
    }


def observed(recording: Recording, short_at: int) -> Document:
    """Return what happened in the window."""
    records, seconds = recording.records, recording.until - recording.start
    done = [record for record in records if record.completed]
    outcomes = Counter(f"{record.priority.value} {record.outcome.value}" for record in records)
    groups, causes = groups_of(records, short_at), Counter[str]()
    for line, record in zip(recording.lines, records, strict=True):
        if groups["short"](record):
            causes.update(line["causes_s"])
    return {
        "from": recording.start,
        "until": recording.until,
        "requests": len(records),
        "requests_per_s": len(records) / max(1.0, seconds),
        "outcomes": dict(outcomes.most_common()),
        "prompt_tokens": Distribution.of(record.prompt_tokens for record in done).as_json(),
        "output_tokens": Distribution.of(record.output_tokens for record in done).as_json(),
        "cached_ratio": sum(line["cached_length"] for line in recording.lines)
        / max(1, sum(record.prompt_tokens for record in done)),
        "tokens": figures(records)["tokens"],
        "groups": {name: figures(filter(of, records)) for name, of in groups.items()},
        "blocks": {name: _blocks(list(filter(groups[name], records))) for name in ("short", "long")},
        "short_queue_causes_s": dict(causes.most_common()),
    }


def _blocks(records: Sequence[RequestRecord]) -> list[Document]:
    """Return the figures of equal parts of the requests, by arrival."""
    bounds = [len(records) * number // _BLOCKS for number in range(_BLOCKS + 1)]
    return [figures(records[begin:end]) for begin, end in itertools.pairwise(bounds)]
