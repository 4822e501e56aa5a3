"""How fast the recorded engines were: step times that are told, or fitted to the recorded requests.

Told are those that the tuner has fitted, or those of a profile. Where they are wrong for the recorded
requests by more than a few percent, the fit of `twin.engine_fit` is tried as well. Whichever replays the
recorded waits better is used.
"""

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass

from serve_app.counterfactuals.recording import RecordedRequest, Recording
from serve_app.metrics.record import RequestRecord
from serve_app.tuning.online.twin_calibration import CalibrationSettings, TwinCalibration
from serve_app.tuning.twin.engine_fit import EngineFitTask, Engines, fit_engines

StepTimes = Mapping[str, Mapping[str, float]]

_LATENCY = "latency_s"
# Limits of an engine are told, and its step times are about to be fitted.
_ANY = {
    _LATENCY: 0.0,
    "decode_base_s": 0.02,
    "decode_per_sequence_s": 0.0001,
    "prefill_base_s": 0.02,
    "prefill_per_token_s": 0.0001,
}
# Of mean TTFT from dispatch, and of TPOT: step times that are told stay while they are as right as that.
_KEPT_WITHIN = 0.05
FITTED = "fitted to these requests"


@dataclass(frozen=True, slots=True)
class KnownEngines:
    """Step times by pool, and where they come from, in words."""

    step_times: StepTimes
    source: str


def engines_of(recording: Recording) -> Iterator[KnownEngines]:
    """The step times that may be the right ones: those that were told, and those that fit."""
    if recording.step_times:
        yield KnownEngines(recording.step_times, recording.step_times_from)
    fitted = _fitted(recording)
    if fitted:
        yield KnownEngines(fitted, FITTED)


def slowed(step_times: StepTimes, factor: float) -> StepTimes:
    """Engines each step of which takes so many times as long."""
    return {
        pool: {name: value if name == _LATENCY else factor * value for name, value in times.items()}
        for pool, times in step_times.items()
    }


def _fitted(recording: Recording) -> StepTimes:
    fleet = [*recording.fleet, *(each.joined for each in recording.changes if each.joined is not None)]
    if not fleet:
        return {}
    plans = _calibrated({spec.pool: _ANY for spec in fleet}).engines(fleet)
    records = [record for each in recording.requests if (record := _record(each)) is not None]
    task = EngineFitTask(
        records=records,
        plans=plans or (),
        until=max((each.finished_at for each in records), default=0.0),
        known=_known(recording),
        keep_within=_KEPT_WITHIN,
    )
    return _plain(fit_engines(task).engines or {})


def _known(recording: Recording) -> Engines:
    if not recording.step_times:
        return {}
    return _calibrated(recording.step_times).known


def _plain(engines: Engines) -> StepTimes:
    return {pool: {_LATENCY: each.latency_s, **asdict(each.step_time)} for pool, each in engines.items()}


def _calibrated(step_times: StepTimes) -> TwinCalibration:
    calibration = TwinCalibration(CalibrationSettings(), None)
    calibration.restore(step_times)
    return calibration


def _record(recorded: RecordedRequest) -> RequestRecord | None:
    """The request as its engine saw it; None where it had none, or has not ended."""
    if recorded.dispatched_s is None or recorded.ended_s is None or recorded.outcome is None:
        return None
    usage = recorded.usage
    cached = usage.cached_tokens if usage is not None else 0
    return RequestRecord(
        request_id=recorded.request_id,
        arrived_at=recorded.arrived_s,
        dispatched_at=recorded.dispatched_s,
        first_token_at=recorded.first_token_s,
        finished_at=recorded.ended_s,
        outcome=recorded.outcome,
        prompt_tokens=max(1, recorded.prompt_tokens - cached),
        output_tokens=usage.output_tokens if usage is not None else 0,
        pool=recorded.pool,
        replica=recorded.replica,
    )
