"""The fit of the step-time model: coefficients under which a replay has the measured latencies.

All requests are replayed at their queued times, because later requests compete with the fitted ones. Only the
timings of the fitted requests count. Residuals are relative, for TTFT, TPOT and E2E each, and of three kinds:
per request, per quantile, and of the mean.

The residuals are not smooth: a small change moves an arrival into another step, or a preemption to another
request, and everything after it. So the fit has three stages. The first is least squares with wide
differences and a wide tolerance for outliers, the second the same with narrow ones, the third a simplex
search, which needs no derivatives. Every stage is deterministic.
"""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, fields

import numpy as np

from serve_app.calibration.measurement import MeasuredRequest
from serve_app.calibration.measurements import CalibrationError
from serve_app.calibration.replay import Floats, Timings, measured, replay
from serve_app.calibration.start import starting_point, typical_step_s
from serve_app.engine_model.settings import EngineModelSettings
from serve_app.engine_model.step_time import StepTimeModel

# Fewer requests do not determine six coefficients.
MIN_FITTED = 20

# Request timings do not separate these from the other coefficients: they stay 0.
_NOT_FITTED = {"decode_compute_s", "expert_read_s", "expert_share"}
_NAMES = tuple(field.name for field in fields(StepTimeModel) if field.name not in _NOT_FITTED)
_QUANTILES = np.linspace(2.5, 97.5, 39)
# The weight of a mean, in requests: plans are made from means.
_MEAN_WEIGHT = 5.0
# An arrival waits for the step under way, whose end is unknown, so differences of a few steps in a TTFT are
# noise. A TTFT of fewer steps than this counts little in relative residuals.
_CHANCE_STEPS = 10.0
_FLOOR_SHARES = (0.05, 0.02, 0.02)
# Regularisation towards the start, for coefficients that the data do not determine; the base of prefills
# shows only on an otherwise idle engine.
_REGULARISATION = 0.01
_REGULARISATION_OF = {"prefill_base_s": 0.1}
# A coefficient changes by a factor of at most e^5 from the start.
_MAX_LOG_FACTOR = 5.0
# Relative residual from which a request counts as an outlier.
_TOLERANCE = 0.03
_SIMPLEX_REPLAYS = 150
_SIMPLEX_STEPS = {"decode_base_s": 0.05, "prefill_per_token_s": 0.05}
_SIMPLEX_STEP = 0.2


@dataclass(frozen=True, slots=True)
class _Stage:
    """One run of least squares: relative width of differences, tolerance, and how many steps at most."""

    width: float
    tolerance: float
    steps: int


_STAGES = (_Stage(0.05, 0.1, 6), _Stage(0.02, _TOLERANCE, 8))

# For a progress bar; least squares may stop early.
EXPECTED_REPLAYS = sum(stage.steps for stage in _STAGES) * (len(_NAMES) + 1) + _SIMPLEX_REPLAYS


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
        settings: limits of the engine.
        on_replay: called after each replay, for a progress bar.

    Raises:
        CalibrationError: there are too few requests to fit.
    """
    if not MIN_FITTED <= fit_first <= len(requests):
        raise CalibrationError(
            f"cannot fit {fit_first} of {len(requests)} requests: at least {MIN_FITTED} are needed to tell "
            f"{len(_NAMES)} coefficients"
        )
    residuals = _Residuals(requests, fit_first, settings, on_replay)
    position = np.zeros(len(_NAMES))
    for stage in _STAGES:
        position = _least_squares(residuals, position, stage)
    return residuals.step_time(_simplex(residuals, position))


def _least_squares(residuals: "_Residuals", position: Floats, stage: _Stage) -> Floats:
    # scipy doubles the start-up time of the command line, which other commands need not wait for.
    from scipy.optimize import least_squares  # noqa: PLC0415

    found: Floats = least_squares(
        residuals,
        position,
        bounds=(-_MAX_LOG_FACTOR, _MAX_LOG_FACTOR),
        diff_step=stage.width,
        loss="soft_l1",
        f_scale=stage.tolerance,
        max_nfev=stage.steps,
    ).x
    return found


def _simplex(residuals: "_Residuals", position: Floats) -> Floats:
    from scipy.optimize import minimize  # noqa: PLC0415 - as above

    steps = np.diag([_SIMPLEX_STEPS.get(name, _SIMPLEX_STEP) for name in _NAMES])
    options = {
        "initial_simplex": np.vstack([position, position + steps]),
        "maxfev": _SIMPLEX_REPLAYS,
        "adaptive": True,
    }
    found: Floats = minimize(residuals.total, position, method="Nelder-Mead", options=options).x
    return found


class _Residuals:
    """The differences of a replay from the measurement, as a function of the coefficients.

    A position is the logarithm of each coefficient over its start: all stay positive, and steps are relative.
    """

    def __init__(
        self,
        requests: Sequence[MeasuredRequest],
        fit_first: int,
        settings: EngineModelSettings,
        on_replay: Callable[[], object],
    ) -> None:
        seen = requests[:fit_first]
        self._requests = requests
        self._part = slice(fit_first)
        self._settings = settings
        self._on_replay = on_replay
        self._start = starting_point(seen)
        self._measured = measured(seen)
        chance_s = _CHANCE_STEPS * typical_step_s(seen)
        medians = [float(np.median(values)) for values in _of(self._measured)]
        ttft, tpot, e2e = (share * median for share, median in zip(_FLOOR_SHARES, medians, strict=True))
        self._floors = (ttft + chance_s, tpot, e2e)
        weights = [_REGULARISATION_OF.get(name, _REGULARISATION) for name in _NAMES]
        self._regularisation = np.array(weights)

    def __call__(self, position: Floats) -> Floats:
        """All residuals, as logarithms of ratios."""
        played = replay(self._requests, self._settings, self.step_time(position), part=self._part)
        self._on_replay()
        parts = [self._regularisation * position]
        for ours, theirs, floor in zip(_of(played), _of(self._measured), self._floors, strict=True):
            parts.append(np.log((ours + floor) / (theirs + floor)))
            quantiles = np.percentile(ours, _QUANTILES) + floor, np.percentile(theirs, _QUANTILES) + floor
            parts.append(np.log(quantiles[0] / quantiles[1]))
            parts.append(np.array([_MEAN_WEIGHT * np.log(ours.mean() / theirs.mean())]))
        return np.concatenate(parts)

    def total(self, position: Floats) -> float:
        """The loss: quadratic in small residuals, linear in outliers."""
        return float(np.sum(np.sqrt(1.0 + (self(position) / _TOLERANCE) ** 2) - 1.0))

    def step_time(self, position: Floats) -> StepTimeModel:
        """The coefficients at a position."""
        start = asdict(self._start)
        return StepTimeModel(
            **{name: start[name] * float(np.exp(at)) for name, at in zip(_NAMES, position, strict=True)}
        )


def _of(timings: Timings) -> tuple[Floats, Floats, Floats]:
    return timings.ttft_s, timings.tpot_s, timings.e2e_s
