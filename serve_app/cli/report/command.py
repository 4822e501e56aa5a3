"""Command `report`: one page about the last minutes: latencies, waits, and what scheduling changes.

It has the requests of the last minutes as the scheduler recorded them, and their figures. A forecast plays
them in the tuner's digital twin, unscheduled and scheduled.

The twin's engines have the limits of the connected ones, and step times fitted to the same recording. First
the recording is replayed as it was served, which gives the error of the twin. Windows drawn from the
recording (block bootstrap) are then played in both ways. An interval shows where the figure of another window
of such traffic is expected: it contains neither the error of the twin nor other traffic.
"""

import argparse
import itertools
import json
import math
import statistics
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from serve_app.cli.application import ApplicationClient, ApplicationError, add_address
from serve_app.cli.command import add_number, add_whole, print_result, progress_bar, warn, write_text
from serve_app.cli.report.page import as_html, as_text
from serve_app.core import SchedulerSettings
from serve_app.core.metrics.record import RequestRecord
from serve_app.core.metrics.summary import Distribution, t_95
from serve_app.core.routing.replica import UNREPORTED_CONTEXT, ReplicaSpec
from serve_app.core.settings_base import read
from serve_app.errors import Outcome, ServeAppError, SettingsError
from serve_app.lab.simulation.simulation import ReplicaPlan, SimulationSettings
from serve_app.lab.workloads import Trace
from serve_app.request import PriorityClass
from serve_app.serving.scheduler.journal import MAX_ENDED
from serve_app.tuning.digital_twin import (
    CalibrationSettings,
    DigitalTwin,
    TrafficLog,
    TwinCalibration,
    TwinPlan,
    TwinSettings,
    resampled,
)
from serve_app.tuning.engine_fit import fit_engines
from serve_app.tuning.search_space import SearchSpace, Tunable, parameters_of

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


WINDOWS = 10
# Compared figures, and how many requests of a group each needs: ten beyond a percentile. With fewer, the
# error of a percentile shows chance rather than the twin.
_COMPARED = {
    "ttft_mean_s": 20,
    "ttft_p95_s": 200,
    "ttft_p99_s": 1_000,
    "tpot_mean_s": 20,
    "not_completed_ratio": 20,
}
MAX_ERROR_RATIO = 0.2
"""Error of the twin above which there is no prediction."""
_DEFAULTS = SchedulerSettings(model="any")
# Requests per window. More take more time, and hardly narrow the intervals.
_MAX_PLAYED = 4_000


class Forecast:
    """The twin of one recording.

    Args:
        replicas: the application's replicas, by id.
        settings: of the application's scheduler.

    Raises:
        ReportError: there are too few requests to fit the engines.
    """

    def __init__(
        self,
        recording: Recording,
        replicas: Mapping[str, Mapping[str, Any]],
        settings: SchedulerSettings,
        short_at: int,
    ) -> None:
        self._settings, self._short_at, self._recording = settings, short_at, recording
        specs = [_spec(name, replica) for name, replica in replicas.items()]
        self._latency_s, self._engines = _fitted(recording, specs)
        longest, log = max(plan.engine.max_model_len for plan in self._engines), TrafficLog()
        for record in recording.records:
            # The twin leaves the others out, so the numbers of its requests would differ.
            if record.prompt_tokens < longest:
                log.add(record)
        traffic = log.trace(recording.until)
        if traffic is None:
            raise ReportError("no recorded prompt fits the engines that are connected now")
        self._records = log.recent(recording.until)[:_MAX_PLAYED]
        self._traffic = replace(traffic, requests=traffic.requests[:_MAX_PLAYED])
        self._warm_up = round(TwinSettings().warm_up_ratio * len(self._records))

    def document(self, on_window: Callable[[], object]) -> Document:
        """Return the twin's error by group and, if it is small, the predicted changes."""
        error = self._error()
        judged = [
            abs(each["error_ratio"]) for of in error.values() for name, each in of.items() if "ttft" in name
        ]
        largest = max(judged, default=math.inf)
        if not judged:
            reason = "the error of the twin is unknown, because too few requests of each length are streamed"
        elif largest > MAX_ERROR_RATIO:
            reason = f"the error of the twin is {largest:.0%}, and may be at most {MAX_ERROR_RATIO:.0%}"
        else:
            return {"error": error, "changes": self._changes(on_window), "reason": ""}
        return {"error": error, "changes": None, "reason": reason}

    def _error(self) -> Document:
        pairs = list(zip(self._records, self._played(self._traffic, 0.0), strict=True))[self._warm_up :]
        # Only streamed answers have a measured time to first token.
        pairs = [(seen, twin) for seen, twin in pairs if seen.completed and seen.ttft_s is not None]
        found: Document = {}
        for group, selects in groups_of((), self._short_at).items():
            chosen = [pair for pair in pairs if selects(pair[0])]
            seen, twin = (figures(pair[side] for pair in chosen) for side in (0, 1))
            found[group] = {
                name: {
                    "measured": seen[name],
                    "twin": twin[name],
                    "error_ratio": (twin[name] or 0.0) / seen[name] - 1,
                }
                for name, needed in _COMPARED.items()
                if seen[name] and len(chosen) >= needed
            }
        return found

    def _changes(self, on_window: Callable[[], object]) -> Document:
        values: dict[tuple[str, str], list[tuple[float, float]]] = defaultdict(list)
        groups, block = groups_of(self._records, self._short_at), max(1, len(self._records) // _BLOCKS)
        for number in range(WINDOWS):
            window = resampled(self._traffic, len(self._records), block, seed=0, number=number)
            both = [self._played(window, share)[self._warm_up :] for share in (0.0, 1.0)]
            on_window()
            for group, selects in groups.items():
                before, after = (figures(filter(selects, records)) for records in both)
                for name, needed in _COMPARED.items():
                    if before["requests"] >= needed:
                        values[group, name].append((before[name] or 0.0, after[name] or 0.0))
        found: Document = {}
        for (group, name), pairs in values.items():
            if len(pairs) == WINDOWS and (name.endswith("_ratio") or all(map(all, pairs))):
                found.setdefault(group, {})[name] = _change(pairs, is_share=name.endswith("_ratio"))
        return found

    def short_waits(self) -> Document:
        """Return the parts of the time to first token of short prompts, in seconds per request.

        A prefill occupies its engine for its duration in the fitted model, until its first token.
        """
        parts: dict[str, float] = defaultdict(float)
        count, is_short_prompt = 0, groups_of((), self._short_at)["short"]
        for plan in self._engines:
            served = [
                each
                for each in self._recording.records
                if each.replica == plan.replica_id and each.completed and each.ttft_s is not None
            ]
            sent = np.array([each.dispatched_at or each.arrived_at for each in served])
            first = np.array([each.first_token_at for each in served], dtype=float)
            began = np.maximum(sent, first - [_prefill_s(plan, each) for each in served])
            is_long = np.array([each.prompt_tokens > self._short_at for each in served], dtype=bool)
            is_short = np.array([is_short_prompt(each) for each in served], dtype=bool)
            for number in np.flatnonzero(is_short):
                overlap = np.minimum(first, began[number]) - np.maximum(began, sent[number])
                wait_s = began[number] - sent[number]
                behind_s = min(wait_s, float(overlap[is_long & (overlap > 0)].sum()))
                parts["queue"] += sent[number] - served[number].arrived_at
                parts["behind_long_prefills"] += behind_s
                parts["other_engine_time"] += wait_s - behind_s
                parts["own_prefill"] += first[number] - began[number]
                count += 1
        return {name: float(seconds) / count for name, seconds in parts.items()}

    def _played(self, arrivals: Trace, active_share: float) -> list[RequestRecord]:
        """Return the records of a trace in the order of its requests."""
        tunable = Tunable(scheduler=replace(self._settings, active_share=active_share))
        # A twin has at least one parameter, which keeps its value here.
        parameter = next(each for each in parameters_of(_DEFAULTS) if each.is_queue_parameter)
        space = SearchSpace((parameter,), {parameter.name: tunable.value(parameter)})
        plan = TwinPlan(
            tunable=tunable,
            space=space,
            engines=self._engines,
            traffic=self._traffic,
            simulation=SimulationSettings(control_latency_s=self._latency_s),
        )
        records = DigitalTwin(plan).serve(space.current, arrivals)
        return sorted(records, key=lambda record: int(record.request_id.removeprefix("r")))


def _spec(name: str, replica: Mapping[str, Any]) -> ReplicaSpec:
    return ReplicaSpec(
        replica_id=name,
        pool=replica["pool"],
        max_model_len=replica["max_model_len"] or replica.get("learned_context_tokens") or UNREPORTED_CONTEXT,
        kv_tokens=replica["kv_tokens"],
        max_num_seqs=replica["max_num_seqs"],
        max_num_batched_tokens=replica["max_num_batched_tokens"],
        long_prefill_token_threshold=replica["long_prefill_token_threshold"],
    )


def _fitted(recording: Recording, specs: Sequence[ReplicaSpec]) -> tuple[float, tuple[ReplicaPlan, ...]]:
    """Return the latency and the engines, fitted to a recording as the tuner does."""
    calibration, log = TwinCalibration(CalibrationSettings(), None), TrafficLog()
    for record in recording.records:
        log.add(record)
    calibration.note(recording.records)
    task = calibration.due(log, specs, recording.until, recording.until)
    if task is None:
        raise ReportError(
            "no replica is connected" if not specs else f"too few requests: {calibration.obstacle}"
        )
    calibration.finish(fit_engines(task), recording.until)
    engines = calibration.engines(specs)
    if engines is None:
        raise ReportError("the replicas that are connected now served too few of the recorded requests")
    return calibration.latency_s, engines


def _prefill_s(plan: ReplicaPlan, record: RequestRecord) -> float:
    budget = plan.engine.max_num_batched_tokens
    return plan.step_time.prefill_s(record.prompt_tokens, max_num_batched_tokens=budget)


def _change(pairs: Sequence[tuple[float, float]], *, is_share: bool) -> Document:
    """Return both sides and the change: relative, or the difference of shares."""
    before, after = zip(*pairs, strict=True)
    if is_share:
        change = _expected([later - earlier for earlier, later in pairs])
        return {"unscheduled": _expected(before), "scheduled": _expected(after), "change": change}
    # Latencies vary by factors, so intervals of their logarithms are closer to symmetric.
    sides = {
        "unscheduled": before,
        "scheduled": after,
        "change": [later / earlier for earlier, later in pairs],
    }
    found = {side: _expected([math.log(each) for each in values]) for side, values in sides.items()}
    factors = {side: {bound: math.exp(value) for bound, value in of.items()} for side, of in found.items()}
    return {**factors, "change": {bound: value - 1 for bound, value in factors["change"].items()}}


def _expected(values: Sequence[float]) -> dict[str, float]:
    """Return the mean and the 95 % prediction interval of one more value."""
    mean, n = statistics.fmean(values), len(values)
    half = t_95(n - 1) * statistics.stdev(values) * math.sqrt(1 + 1 / n)
    return {"mean": mean, "low": mean - half, "high": mean + half}


EXAMPLE = """example:
  ewsjf mode observe                       # then wait ten minutes
  ewsjf report --html out/observed.html --json > out/observed.json
  ewsjf mode active                        # then wait ten minutes
  ewsjf report --compare out/observed.json --html out/active.html

The application must have served at least 200 streamed responses in the window. In mode observe, the report
predicts what scheduling changes, if the twin's error is small. Exit status 1: there is too little to report.
"""
_MAX_MINUTES = 10


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the arguments."""
    add_number(
        parser, "--minutes", "length of the window, at most 10; it begins at the last change of the mode", 10
    )
    add_whole(
        parser,
        "--short-at",
        "maximum tokens of a short prompt (default: as in --compare, else the boundary of the first of "
        "several pools, else the median prompt)",
    )
    parser.add_argument(
        "--compare",
        type=Path,
        metavar="FILE",
        help="earlier report, written with --json, to compare with; adds a verdict",
    )
    parser.add_argument("--html", type=Path, metavar="FILE", help="also write the report as one HTML page")
    parser.add_argument("--json", action="store_true", help="print the report's document as JSON")
    add_address(parser)


def run(args: argparse.Namespace) -> int:
    """Run the command and return its exit status."""
    if args.minutes > _MAX_MINUTES:
        raise SettingsError(f"--minutes must be at most {_MAX_MINUTES}, got {args.minutes:g}")
    earlier = None if args.compare is None else _earlier(args.compare)
    try:
        document = _document(args, earlier)
    except ReportError as error:
        warn(f"report: {error}")
        return 1
    if args.html is not None:
        write_text(args.html, as_html(document))
    print_result(json.dumps(document, indent=1, allow_nan=False) if args.json else as_text(document))
    return 0


def _earlier(path: Path) -> Document:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise SettingsError(f"--compare {path}: not JSON ({error}); write it with `report --json`") from error
    if not isinstance(found, dict) or not {"observed", "short_at_tokens"} <= found.keys():
        raise SettingsError(f"--compare {path}: not a report; write it with `report --json`")
    return {**found, "earlier": None}


def _document(args: argparse.Namespace, earlier: Document | None) -> Document:
    client = ApplicationClient(args)
    status, queue, mode = (_first(client, path) for path in ("/debug/status", "/debug/queue", "/admin/mode"))
    if "settings" not in queue or "windows" not in mode:
        raise ApplicationError(f"{client.url} is of an older release, without what a report needs: update it")
    model, window = status["model"], mode["windows"][-1]
    body = client.response("/debug/capture?full=true").body
    lines = [line for line in map(json.loads, body.splitlines()) if line.get("model") == model]
    recording = recording_of(lines, args.minutes, window["since"])
    short_at = args.short_at or (earlier or {}).get("short_at_tokens") or _short_at(queue, status, recording)
    settings = read(SchedulerSettings, queue["settings"], as_file=False)
    forecast = Forecast(recording, status["replicas"], settings, short_at)
    with progress_bar("simulated windows", WINDOWS) as on_window:
        return {
            "model": model,
            "created": time.time(),
            "active_share": window["active_share"],
            "policy": settings.policy,
            "short_at_tokens": short_at,
            "observed": observed(recording, short_at),
            "short_waits": forecast.short_waits(),
            "forecast": forecast.document(on_window) if window["active_share"] == 0 else None,
            "earlier": earlier,
        }


def _first(client: ApplicationClient, path: str) -> Mapping[str, Any]:
    models = client.models(path)
    if not models:
        raise ApplicationError(f"{client.url} serves no model")
    if "error" in models[0]:
        raise ApplicationError(f"{models[0]['model']}: {models[0]['error']}")
    return models[0]


def _short_at(queue: Mapping[str, Any], status: Mapping[str, Any], recording: Recording) -> int:
    if len(status["pools"]) > 1:
        return int(queue["b_short_tokens"])
    lengths = [record.prompt_tokens for record in recording.records if not is_batch(record)]
    return max(1, statistics.median_low(lengths or [1]))
