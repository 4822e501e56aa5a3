"""Coefficients under which the engine model plays the measured requests as the real engine did.

All requests are replayed at their queued times, since those that come later compete with those fitted; only
the timings of the fitted ones are looked at. Misses are relative, and of three kinds: request by request,
quantile by quantile, and of the mean, for TTFT, TPOT and E2E each.

The misses are not smooth. A small change moves an arrival into another step, or a preemption to another
request, and everything after it. So the fit goes downhill in three stages: least squares with wide
differences and a wide notion of what is no outlier, the same more finely, then a simplex search, which needs
no derivatives. Every stage is deterministic.
"""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, fields

import numpy as np

from serve_app.calibration.measurements import CalibrationError, MeasuredRequest
from serve_app.calibration.replay import Floats, Timings, measured, replay
from serve_app.calibration.start import starting_point, typical_step_s
from serve_app.engine_model.settings import EngineModelSettings
from serve_app.engine_model.step_time import StepTimeModel

# Fewer requests do not tell six coefficients.
MIN_FITTED = 20

# Request timings do not tell these from the coefficients beside them: they stay 0.
_NOT_FITTED = {"decode_compute_s", "expert_read_s", "expert_share"}
_NAMES = tuple(field.name for field in fields(StepTimeModel) if field.name not in _NOT_FITTED)
_QUANTILES = np.linspace(2.5, 97.5, 39)
# A mean counts as much as this many requests: it is what a plan is made of.
_MEAN_WEIGHT = 5.0
# An arrival waits for the step under way, whose end the model cannot know: differences of a few steps in a
# TTFT are chance. Relative misses are taken from this many steps up.
_CHANCE_STEPS = 10.0
_FLOOR_SHARES = (0.05, 0.02, 0.02)
# Pull towards the start, for coefficients that the data do not tell; the base of prefills shows only on an
# engine that is otherwise idle.
_PULL = 0.01
_PULLS = {"prefill_base_s": 0.1}
# Coefficients move by a factor of up to e^5 from the start.
_MAX_LOG_FACTOR = 5.0
# From which relative miss on a request counts as an outlier.
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

# What a progress bar is told to expect; least squares may stop early.
EXPECTED_REPLAYS = sum(stage.steps for stage in _STAGES) * (len(_NAMES) + 1) + _SIMPLEX_REPLAYS


@dataclass(frozen=True, slots=True)
class CalibrationFit:
    """The outcome of a fit.

    Attributes:
        step_time: the coefficients.
        replays: how often the requests were replayed.
    """

    step_time: StepTimeModel
    replays: int


def fit_step_time(
    requests: Sequence[MeasuredRequest],
    fit_first: int,
    settings: EngineModelSettings,
    on_replay: Callable[[], object] = lambda: None,
) -> CalibrationFit:
    """CalibrationFit the step-time model to the timings of the first requests.

    Args:
        requests: all that the engine served, in the order of arrival.
        fit_first: how many of them to look at.
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
    misses = _Misses(requests, fit_first, settings, on_replay)
    position = np.zeros(len(_NAMES))
    for stage in _STAGES:
        position = _least_squares(misses, position, stage)
    position = _simplex(misses, position)
    return CalibrationFit(misses.step_time(position), misses.replays)


def _least_squares(misses: "_Misses", position: Floats, stage: _Stage) -> Floats:
    # scipy takes as long to load as all the rest of the command line, which other commands need not wait for.
    from scipy.optimize import least_squares  # noqa: PLC0415

    found: Floats = least_squares(
        misses,
        position,
        bounds=(-_MAX_LOG_FACTOR, _MAX_LOG_FACTOR),
        diff_step=stage.width,
        loss="soft_l1",
        f_scale=stage.tolerance,
        max_nfev=stage.steps,
    ).x
    return found


def _simplex(misses: "_Misses", position: Floats) -> Floats:
    from scipy.optimize import minimize  # noqa: PLC0415 - as above

    steps = np.diag([_SIMPLEX_STEPS.get(name, _SIMPLEX_STEP) for name in _NAMES])
    options = {
        "initial_simplex": np.vstack([position, position + steps]),
        "maxfev": _SIMPLEX_REPLAYS,
        "adaptive": True,
    }
    found: Floats = minimize(misses.total, position, method="Nelder-Mead", options=options).x
    return found


class _Misses:
    """How far a replay is from the measurement, as a function of the coefficients.

    A position is the logarithm of each coefficient over its start: all stay positive, and steps are relative.

    Attributes:
        replays: done so far.
    """

    def __init__(
        self,
        requests: Sequence[MeasuredRequest],
        fit_first: int,
        settings: EngineModelSettings,
        on_replay: Callable[[], object],
    ) -> None:
        seen = requests[:fit_first]
        self.replays = 0
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
        self._pulls = np.array([_PULLS.get(name, _PULL) for name in _NAMES])

    def __call__(self, position: Floats) -> Floats:
        """All misses, as logarithms of ratios."""
        played = replay(self._requests, self._settings, self.step_time(position), part=self._part)
        self.replays += 1
        self._on_replay()
        parts = [self._pulls * position]
        for ours, theirs, floor in zip(_of(played), _of(self._measured), self._floors, strict=True):
            parts.append(np.log((ours + floor) / (theirs + floor)))
            quantiles = np.percentile(ours, _QUANTILES) + floor, np.percentile(theirs, _QUANTILES) + floor
            parts.append(np.log(quantiles[0] / quantiles[1]))
            parts.append(np.array([_MEAN_WEIGHT * np.log(ours.mean() / theirs.mean())]))
        return np.concatenate(parts)

    def total(self, position: Floats) -> float:
        """One figure: quadratic in small misses, linear in outliers."""
        return float(np.sum(np.sqrt(1.0 + (self(position) / _TOLERANCE) ** 2) - 1.0))

    def step_time(self, position: Floats) -> StepTimeModel:
        """The coefficients at a position."""
        start = asdict(self._start)
        return StepTimeModel(
            **{name: start[name] * float(np.exp(at)) for name, at in zip(_NAMES, position, strict=True)}
        )


def _of(timings: Timings) -> tuple[Floats, Floats, Floats]:
    return timings.ttft_s, timings.tpot_s, timings.e2e_s
