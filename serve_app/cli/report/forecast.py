"""Forecast: the requests of a recording in the tuner's digital twin, unscheduled and scheduled.

The twin's engines have the limits of the connected ones, and step times fitted to the same recording. First
the recording is replayed as it was served, which gives the error of the twin. Windows drawn from the
recording (block bootstrap) are then played in both ways. An interval shows where the figure of another window
of such traffic is expected: it contains neither the error of the twin nor other traffic.
"""

import math
import statistics
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from serve_app.cli.report.recording import Document, Recording, ReportError, figures, groups_of
from serve_app.core import SchedulerSettings
from serve_app.core.metrics.record import RequestRecord
from serve_app.core.metrics.summary import t_95
from serve_app.core.routing.replica import UNREPORTED_CONTEXT, ReplicaSpec
from serve_app.lab.simulation.simulation import ReplicaPlan, SimulationSettings
from serve_app.lab.workloads.trace import Trace
from serve_app.tuning.digital_twin import DigitalTwin, TwinPlan, TwinSettings
from serve_app.tuning.engine_fit import fit_engines
from serve_app.tuning.search_space import SearchSpace, Tunable, parameters_of
from serve_app.tuning.traffic import TrafficLog, resampled
from serve_app.tuning.twin_calibration import CalibrationSettings, TwinCalibration

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
_BLOCKS = 10


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
