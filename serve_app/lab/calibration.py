"""Calibration: fits the coefficients of the step-time model to request timestamps of a real engine.

- `read_measurements`: an engine's own timestamps, or a result of `vllm bench serve`, from a file.
- `replay`: plays measured arrivals in the engine model; `compare` returns the errors of its timings.
- `fit_step_time`: finds coefficients with which a replay has the measured latencies.

`read_measurements`. A file of an engine has one JSON object per line, with `queued_ts`, `scheduled_ts`,
`first_token_ts`, `last_token_ts` (seconds on one clock), `input_toks` and `output_toks`. vLLM records these
timestamps for its metrics. The result of `vllm bench serve --save-result --save-detailed` is one object with
a list per figure. Other keys are ignored.

A client does not see the start of the first step, so the whole TTFT counts as time in the engine, including
the network and the tokenizer.

`compare`. TTFT and E2E count from `queued_at`, so neither includes the time before the engine (network,
tokenizer).

The error of a statistic (mean, median, p90 or p99) is `played / measured - 1`, of the whole distribution. It
is not the mean error of single requests, because a preemption may affect another request in the replay.

`fit_step_time`. All requests are replayed at their queued times, because later requests compete with the
fitted ones. Only the timings of the fitted requests count. Residuals are relative, for TTFT, TPOT and E2E
each, and of three kinds: per request, per quantile, and of the mean. Several engines of one kind can be
fitted together.

The residuals are not smooth: a small change moves an arrival to another step, or a preemption to another
request, and affects everything after it. So the fit has three stages: least squares with wide differences and
a high tolerance for outliers, the same with narrow ones, and a simplex search, which needs no derivatives.
Every stage is deterministic.

The fit starts from coefficients derived from the timestamps, and from typical proportions where these do not
suffice. The timestamps give the duration of a typical decode step and the pace of prefills. They do not give
the shares of base, sequences and context in a decode step of a saturated engine, because its cache is full
and all three hardly vary. The proportions below are those of measured GPUs; the fit adjusts them to the data.
"""

import itertools
import json
import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from serve_app.engines.model.model import EngineModel, EngineModelSettings, EngineSequence
from serve_app.engines.model.step_time import StepTimeModel
from serve_app.errors import ServeAppError


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredRequest:
    """One request in the engine; times are seconds on one clock.

    Attributes:
        prompt_tokens: length of its prompt.
        queued_at: entry to the engine's waiting queue.
        scheduled_at: start of its first step.
        first_token_at, last_token_at: generation of those tokens.
    """

    prompt_tokens: int
    output_tokens: int
    queued_at: float
    scheduled_at: float
    first_token_at: float
    last_token_at: float

    def __post_init__(self) -> None:
        instants = (self.queued_at, self.scheduled_at, self.first_token_at, self.last_token_at)
        if not all(math.isfinite(instant) for instant in instants):
            raise ValueError("a timestamp is not finite")
        if self.prompt_tokens < 1 or self.output_tokens < 1:
            raise ValueError("a token count is below 1")
        if list(instants) != sorted(instants) or self.first_token_at == self.queued_at:
            raise ValueError("its timestamps are out of order")
        if self.output_tokens > 1 and self.last_token_at == self.first_token_at:
            raise ValueError("it generated several tokens at the same time")


def number(row: Mapping[str, Any], name: str) -> float:
    """Return a number of a row.

    Raises:
        ValueError: the row has no number of that name.
    """
    value = row.get(name)
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ValueError(f"{name} is missing or not a number")  # noqa: TRY004 - one type for all invalid rows
    return float(value)


def whole_number(row: Mapping[str, Any], name: str) -> int:
    """Return a whole number of a row.

    Raises:
        ValueError: the row has no whole number of that name.
    """
    value = number(row, name)
    if not value.is_integer():
        raise ValueError(f"{name} is not a whole number")
    return int(value)


class CalibrationError(ServeAppError):
    """The measurements cannot be used for a calibration."""


@dataclass(frozen=True, slots=True)
class Measurements:
    """The readable requests of a file.

    Attributes:
        requests: in order of arrival.
        skipped: number of unreadable ones by reason.
        of_client: whether the timestamps are those of a client.
    """

    requests: list[MeasuredRequest] = field(default_factory=list)
    skipped: Counter[str] = field(default_factory=Counter)
    of_client: bool = False


def read_measurements(path: Path) -> Measurements:
    """Read a file of measured requests. Unreadable ones are counted by reason.

    Raises:
        CalibrationError: the file is missing, has no readable request, or is a result without details.
    """
    try:
        text = path.read_text(encoding="utf-8", errors="replace")
    except OSError as error:
        raise CalibrationError(f"cannot read {path}: {error.strerror or error}") from error
    result = _result(text)
    measurements = Measurements(of_client=result is not None)
    rows = filter(str.strip, text.splitlines()) if result is None else _rows(path, result)
    for row in rows:
        try:
            request = _from_engine(row) if isinstance(row, str) else _from_client(row)
        except json.JSONDecodeError:
            measurements.skipped["it is not JSON"] += 1
        except (ValueError, OverflowError) as error:
            measurements.skipped[str(error)] += 1
        else:
            measurements.requests.append(request)
    if not measurements.requests:
        reasons = ", ".join(sorted(measurements.skipped)) or "the file is empty"
        raise CalibrationError(f"{path} has no valid request: {reasons}")
    measurements.requests.sort(key=lambda request: request.queued_at)
    return measurements


def _result(text: str) -> dict[str, Any] | None:
    """Return the result of `vllm bench serve`; None if the text is something else."""
    try:
        document = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return document if isinstance(document, dict) and "request_throughput" in document else None


_FIGURES = ("start_times", "ttfts", "itls", "input_lens", "output_lens", "errors")


def _rows(path: Path, result: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    missing = [name for name in _FIGURES if not isinstance(result.get(name), list)]
    if missing:
        raise CalibrationError(
            f"{path} has no {', '.join(missing)}: run `vllm bench serve` with --save-detailed, "
            "of vLLM 0.32 or later"
        )
    for figures in zip(*(result[name] for name in _FIGURES), strict=False):
        yield dict(zip(_FIGURES, figures, strict=True))


def _from_client(row: Mapping[str, Any]) -> MeasuredRequest:
    if row["errors"]:
        raise ValueError("it was not completed")
    gaps_s = row["itls"]
    if not isinstance(gaps_s, list) or not all(isinstance(gap_s, int | float) for gap_s in gaps_s):
        raise ValueError("itls is not a list of numbers")
    sent_at = number(row, "start_times")
    first_token_at = sent_at + number(row, "ttfts")
    return MeasuredRequest(
        queued_at=sent_at,
        scheduled_at=sent_at,
        first_token_at=first_token_at,
        last_token_at=first_token_at + sum(gaps_s),
        prompt_tokens=whole_number(row, "input_lens"),
        output_tokens=whole_number(row, "output_lens"),
    )


def _from_engine(line: str) -> MeasuredRequest:
    row = json.loads(line)
    if not isinstance(row, dict):
        raise ValueError("it is not an object")  # noqa: TRY004 - one type for all invalid rows
    return MeasuredRequest(
        queued_at=number(row, "queued_ts"),
        scheduled_at=number(row, "scheduled_ts"),
        first_token_at=number(row, "first_token_ts"),
        last_token_at=number(row, "last_token_ts"),
        prompt_tokens=whole_number(row, "input_toks"),
        output_tokens=whole_number(row, "output_toks"),
    )


# Longest run of pure decode iterations that the model computes at once.
_MAX_STEPS = 1_000_000

Floats = NDArray[np.float64]
Part = slice | list[int]
"""Some of a run's requests, by their indices."""


@dataclass(frozen=True, slots=True)
class Timings:
    """Timings of requests, in seconds and in the order of the requests.

    Attributes:
        ttft_s: first token - queued.
        tpot_s: (last token - first token) / (output tokens - 1); only of requests with two tokens or more.
        e2e_s: last token - queued.
        preemptions: in the replay; 0 in a measurement, which does not contain them.
    """

    ttft_s: Floats
    tpot_s: Floats
    e2e_s: Floats
    preemptions: int = 0


def measured(requests: Sequence[MeasuredRequest]) -> Timings:
    """Return the timings of real requests."""
    first = np.array([request.first_token_at for request in requests])
    last = np.array([request.last_token_at for request in requests])
    return _timings(requests, first, last)


def replay(
    requests: Sequence[MeasuredRequest],
    settings: EngineModelSettings,
    step_time: StepTimeModel,
    *,
    part: Part = slice(None),
) -> Timings:
    """Play all requests through the engine model, and return the timings of a part of them.

    Args:
        requests: in order of arrival; of their timestamps only `queued_at` is used.
        part: the requests whose timings are returned.
    """
    # Use a clock that starts near 0, because small steps would be lost in the rounding of large timestamps.
    origin = requests[0].queued_at
    sequences = [_sequence(number, request, origin) for number, request in enumerate(requests)]
    model = EngineModel(settings, step_time)
    for arrived_at, together in itertools.groupby(sequences, key=lambda sequence: sequence.arrived_at):
        _advance(model, arrived_at)
        for sequence in together:
            model.add(sequence, arrived_at)
        if model.ends_at is None:
            model.begin_step(arrived_at, max_steps=_MAX_STEPS)
    _advance(model, float("inf"))
    first = np.array([_instant(sequence.first_token_at) for sequence in sequences]) + origin
    last = np.array([_instant(sequence.finished_at) for sequence in sequences]) + origin
    preemptions = sum(sequence.preemptions for sequence in sequences)
    return _timings(chosen(requests, part), first[part], last[part], preemptions)


def chosen(requests: Sequence[MeasuredRequest], part: Part) -> Sequence[MeasuredRequest]:
    """Return a part of the requests."""
    return requests[part] if isinstance(part, slice) else [requests[index] for index in part]


def _sequence(number: int, request: MeasuredRequest, origin: float) -> EngineSequence:
    return EngineSequence(
        str(number), request.prompt_tokens, request.output_tokens, request.queued_at - origin
    )


def _advance(model: EngineModel, until: float) -> None:
    """Run the engine until `until`. A step that ends at that instant remains open for arrivals then."""
    while model.ends_at is not None and model.ends_at < until:
        ended_at = model.end_step().ended_at
        model.begin_step(ended_at, max_steps=_MAX_STEPS)


def _instant(instant: float | None) -> float:
    assert instant is not None, "every request ends in a replay"
    return instant


def _timings(
    requests: Sequence[MeasuredRequest], first: Floats, last: Floats, preemptions: int = 0
) -> Timings:
    queued = np.array([request.queued_at for request in requests])
    output_tokens = np.array([request.output_tokens for request in requests])
    several = output_tokens > 1
    tpot = (last - first)[several] / (output_tokens[several] - 1)
    return Timings(first - queued, tpot, last - queued, preemptions)


METRICS = ("ttft_s", "tpot_s", "e2e_s")


@dataclass(frozen=True, slots=True)
class Statistics:
    """Statistics of one metric over some requests, in seconds or as relative errors."""

    mean: float
    p50: float
    p90: float
    p99: float


@dataclass(frozen=True, slots=True)
class Accuracy:
    """One metric, measured and played, both in seconds."""

    measured: Statistics
    played: Statistics

    @property
    def errors(self) -> Statistics:
        """Relative errors, positive if the model is too slow."""
        simulated, observed = asdict(self.played), asdict(self.measured)
        return Statistics(**{name: simulated[name] / observed[name] - 1.0 for name in simulated})


def compare(played: Timings, measured: Timings) -> dict[str, Accuracy]:
    """Return the accuracy of each metric by name, without metrics that no request has."""
    found = {}
    for metric in METRICS:
        simulated, observed = getattr(played, metric), getattr(measured, metric)
        if len(observed):
            found[metric] = Accuracy(_statistics(observed), _statistics(simulated))
    return found


def _statistics(values: Floats) -> Statistics:
    p50, p90, p99 = (float(value) for value in np.percentile(values, (50, 90, 99)))
    return Statistics(float(values.mean()), p50, p90, p99)


# Share per sequence of the base of a decode step: 0.4 % for an 8B model on one RTX 4090, 1.1 % for a 70B
# model on four H100.
_SEQUENCE_SHARE = 0.005
# Share per token of context: its KV entries (128 KiB) over 16 GB of weights, both read from the same memory.
_CONTEXT_SHARE = 5e-6
# Share of attention in a prefill, relative to its matrix products, at the mean prompt.
_PAIR_SHARE = 0.05
# Prefills share steps with decoding, so a prompt in a busy engine takes slightly longer than its own cost.
_OWN_PREFILL_SHARE = 0.9
# Preempted requests and those in a prefill burst decode slowly. The fastest quarter shows pure decode steps.
_TYPICAL_PERCENTILE = 25.0


def initial_coefficients(requests: Sequence[MeasuredRequest]) -> StepTimeModel:
    """Return rough coefficients, within a factor of about two.

    Raises:
        CalibrationError: no request generated two tokens, so there is no decode step.
    """
    decoding = [request for request in requests if request.output_tokens > 1]
    if not decoding:
        raise CalibrationError(
            "no measured request has 2 or more output tokens, so decode steps are not observed"
        )
    base = typical_step_s(decoding) / (1.0 + _decode_load(decoding))
    per_token = _prefill_pace_s(requests)
    mean_prompt = float(np.mean([request.prompt_tokens for request in requests]))
    return StepTimeModel(
        decode_base_s=base,
        decode_per_sequence_s=_SEQUENCE_SHARE * base,
        decode_per_context_token_s=_CONTEXT_SHARE * base,
        prefill_base_s=base / 2,
        prefill_per_token_s=_OWN_PREFILL_SHARE * per_token,
        prefill_per_pair_s=_PAIR_SHARE * per_token / mean_prompt,
    )


def typical_step_s(requests: Sequence[MeasuredRequest]) -> float:
    """Return the seconds of a typical decode step, from requests with two tokens or more."""
    paces = [
        (request.last_token_at - request.first_token_at) / (request.output_tokens - 1)
        for request in requests
        if request.output_tokens > 1
    ]
    return float(np.percentile(paces, _TYPICAL_PERCENTILE))


def _decode_load(requests: Sequence[MeasuredRequest]) -> float:
    """Return the time that sequences and context add to a typical step, as a share of its base."""
    begin = min(request.first_token_at for request in requests)
    span_s = max(request.last_token_at for request in requests) - begin
    sequences = context_tokens = 0.0
    for request in requests:
        present = (request.last_token_at - request.first_token_at) / span_s
        sequences += present
        context_tokens += present * (request.prompt_tokens + request.output_tokens / 2)
    return _SEQUENCE_SHARE * max(1.0, sequences) + _CONTEXT_SHARE * context_tokens


def _prefill_pace_s(requests: Sequence[MeasuredRequest]) -> float:
    """Return the seconds per prompt token: the median over requests of time from scheduling to first token.

    Each time is divided by the tokens of all prompts that were completed in it, including the request's own.
    """
    scheduled = np.array([request.scheduled_at for request in requests])
    first = np.array([request.first_token_at for request in requests])
    prompts = np.array([request.prompt_tokens for request in requests], dtype=float)
    paces = [
        (end - begin) / prompts[(first > begin) & (first <= end)].sum()
        for begin, end in zip(scheduled, first, strict=True)
        if end > begin
    ]
    if not paces:
        raise CalibrationError(
            "every first token has the time of its scheduling, so prefills are not observed"
        )
    return float(np.median(paces))


# Fewer requests do not determine six coefficients.
MIN_FITTED = 20

# Request timings do not separate these from the other coefficients, so they remain 0.
_NOT_FITTED = {"decode_compute_s", "expert_read_s", "expert_share"}
_NAMES = tuple(each.name for each in fields(StepTimeModel) if each.name not in _NOT_FITTED)
_LATENCY = "latency_s"
_QUANTILES = np.linspace(2.5, 97.5, 39)
# Weight of a mean in requests. It is high because plans are made from means.
_MEAN_WEIGHT = 5.0
# An arrival waits for the current step, whose end is unknown, so differences of a few steps in a TTFT are
# noise. A TTFT of fewer steps than this counts little in relative residuals.
_CHANCE_STEPS = 10.0
_FLOOR_SHARES = (0.05, 0.02, 0.02)
# Regularisation towards the start, for coefficients that the data do not determine. The base of prefills is
# visible only on an otherwise idle engine.
_REGULARISATION = 0.01
_REGULARISATION_OF = {"prefill_base_s": 0.1}
# A coefficient changes by a factor of at most e^5 from the start.
_MAX_LOG_FACTOR = 5.0
_OFFSET = 100.0
# Relative residual above which a request counts as an outlier.
_TOLERANCE = 0.03
_SIMPLEX_REPLAYS = 150
_SIMPLEX_STEPS = {"decode_base_s": 0.05, "prefill_per_token_s": 0.05}
_SIMPLEX_STEP = 0.2


@dataclass(frozen=True, slots=True)
class _Stage:
    """A run of least squares: relative width of differences, tolerance, and maximum number of steps."""

    width: float
    tolerance: float
    steps: int


_STAGES = (_Stage(0.05, 0.1, 6), _Stage(0.02, _TOLERANCE, 8))

# For a progress bar. Least squares may stop early.
EXPECTED_REPLAYS = sum(stage.steps for stage in _STAGES) * (len(_NAMES) + 1) + _SIMPLEX_REPLAYS


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineRun:
    """The requests that one engine served.

    Attributes:
        requests: all of them, in order of arrival.
        part: the requests whose timings are fitted; the others only compete with them.
    """

    requests: Sequence[MeasuredRequest]
    settings: EngineModelSettings
    part: Part = field(default_factory=lambda: slice(None))

    @property
    def fitted(self) -> Sequence[MeasuredRequest]:
        """The requests of the part."""
        return chosen(self.requests, self.part)

    def played(self, step_time: StepTimeModel) -> Timings:
        """Return the timings of the part in the engine model."""
        return replay(self.requests, self.settings, step_time, part=self.part)


@dataclass(frozen=True, slots=True, kw_only=True)
class FitStart:
    """Start of a fit, and what it fits.

    Attributes:
        step_time: initial coefficients, near which those that the data do not determine remain.
        latency_s: time added to a TTFT by an observer outside the engine; 0 for the engine's own timestamps,
            and nothing is fitted then.
        is_warm_start: whether the data have hardly changed since the start was fitted, so that the last
            stages suffice.
    """

    step_time: StepTimeModel
    latency_s: float = 0.0
    is_warm_start: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class FittedEngine:
    """Result of a fit, with fields as in `FitStart`."""

    step_time: StepTimeModel
    latency_s: float


def fit_step_time(
    requests: Sequence[MeasuredRequest],
    fit_first: int,
    settings: EngineModelSettings,
    on_replay: Callable[[], object] = lambda: None,
) -> StepTimeModel:
    """Fit the step-time model to the timings of the first requests.

    Args:
        requests: all requests of the engine, in order of arrival.
        fit_first: number of requests to fit.
        on_replay: called after each replay, for a progress bar.

    Raises:
        CalibrationError: there are too few requests to fit.
    """
    run = EngineRun(requests=requests, settings=settings, part=slice(fit_first))
    return fit_runs([run], FitStart(step_time=initial_coefficients(run.fitted)), on_replay).step_time


def fit_runs(
    runs: Sequence[EngineRun], start: FitStart, on_replay: Callable[[], object] = lambda: None
) -> FittedEngine:
    """Fit one step-time model to engines of one kind.

    Args:
        on_replay: as for `fit_step_time`; called once for all runs.

    Raises:
        CalibrationError: there are too few requests to fit.
    """
    count = sum(len(run.fitted) for run in runs)
    if count < MIN_FITTED:
        raise CalibrationError(
            f"cannot fit {count} of {sum(len(run.requests) for run in runs)} requests: at least {MIN_FITTED} "
            f"are needed for {len(_NAMES)} coefficients"
        )
    residuals = _Residuals(runs, start, on_replay)
    position = np.zeros(len(residuals.names))
    for stage in _STAGES[1:] if start.is_warm_start else _STAGES:
        position = _least_squares(residuals, position, stage)
    return residuals.fitted(_simplex(residuals, position))


def _least_squares(residuals: "_Residuals", position: Floats, stage: _Stage) -> Floats:
    # Imported here because scipy doubles the start-up time of the command line.
    from scipy.optimize import least_squares  # noqa: PLC0415

    # scipy's differences are relative to the argument, so those at 0 are tiny and end near the start, which
    # is good for the engine's own timestamps. With an outside observer the start is less accurate, and only
    # differences as wide as the stage specifies leave it. So the argument is moved far away from 0.
    offset = _OFFSET if residuals.is_from_outside else 0.0
    found: Floats = least_squares(
        lambda moved: residuals(moved - offset),
        position + offset,
        bounds=(offset - _MAX_LOG_FACTOR, offset + _MAX_LOG_FACTOR),
        diff_step=stage.width / max(1.0, offset),
        loss="soft_l1",
        f_scale=stage.tolerance,
        max_nfev=stage.steps,
    ).x
    return found - offset


def _simplex(residuals: "_Residuals", position: Floats) -> Floats:
    from scipy.optimize import minimize  # noqa: PLC0415 - as above

    steps = np.diag([_SIMPLEX_STEPS.get(name, _SIMPLEX_STEP) for name in residuals.names])
    options = {
        "initial_simplex": np.vstack([position, position + steps]),
        "maxfev": _SIMPLEX_REPLAYS,
        "adaptive": True,
    }
    found: Floats = minimize(residuals.total, position, method="Nelder-Mead", options=options).x
    return found


class _Residuals:
    """Differences of a replay from the measurement, as a function of the coefficients.

    A position is the logarithm of each coefficient over its start: all remain positive, and steps are
    relative.

    Attributes:
        names: names of the coefficients, in the order of a position.
        is_from_outside: whether the latency between the observer and the engine is one of them.
    """

    def __init__(self, runs: Sequence[EngineRun], start: FitStart, on_replay: Callable[[], object]) -> None:
        self._runs, self._start, self._on_replay = runs, start, on_replay
        self.is_from_outside = start.latency_s > 0
        self.names = (*_NAMES, _LATENCY) if self.is_from_outside else _NAMES
        seen = [request for run in runs for request in run.fitted]
        self._measured = measured(seen)
        chance_s = _CHANCE_STEPS * typical_step_s(seen)
        medians = [float(np.median(values)) for values in _of(self._measured)]
        ttft, tpot, e2e = (share * median for share, median in zip(_FLOOR_SHARES, medians, strict=True))
        self._floors = (ttft + chance_s, tpot, e2e)
        weights = [_REGULARISATION_OF.get(name, _REGULARISATION) for name in self.names]
        self._regularisation = np.array(weights)

    def __call__(self, position: Floats) -> Floats:
        """Return all residuals, as logarithms of ratios."""
        fitted = self.fitted(position)
        played = with_latency([run.played(fitted.step_time) for run in self._runs], fitted.latency_s)
        self._on_replay()
        parts = [self._regularisation * position]
        for simulated, observed, floor in zip(_of(played), _of(self._measured), self._floors, strict=True):
            parts.append(np.log((simulated + floor) / (observed + floor)))
            quantiles = (
                np.percentile(simulated, _QUANTILES) + floor,
                np.percentile(observed, _QUANTILES) + floor,
            )
            parts.append(np.log(quantiles[0] / quantiles[1]))
            parts.append(np.array([_MEAN_WEIGHT * np.log(simulated.mean() / observed.mean())]))
        return np.concatenate(parts)

    def total(self, position: Floats) -> float:
        """Return the loss: quadratic in small residuals, linear in outliers."""
        return float(np.sum(np.sqrt(1.0 + (self(position) / _TOLERANCE) ** 2) - 1.0))

    def fitted(self, position: Floats) -> FittedEngine:
        """Return the coefficients at a position."""
        start = {**asdict(self._start.step_time), _LATENCY: self._start.latency_s}
        found = {name: start[name] * float(np.exp(at)) for name, at in zip(self.names, position, strict=True)}
        latency_s = found.pop(_LATENCY, 0.0)
        return FittedEngine(step_time=StepTimeModel(**found), latency_s=latency_s)


def with_latency(played: Sequence[Timings], latency_s: float) -> Timings:
    """Return the combined timings of several runs, as an observer outside the engines sees them."""
    return Timings(
        np.concatenate([each.ttft_s for each in played]) + latency_s,
        np.concatenate([each.tpot_s for each in played]),
        np.concatenate([each.e2e_s for each in played]) + latency_s,
        sum(each.preemptions for each in played),
    )


def _of(timings: Timings) -> tuple[Floats, Floats, Floats]:
    return timings.ttft_s, timings.tpot_s, timings.e2e_s
