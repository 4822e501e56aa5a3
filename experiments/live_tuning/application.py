"""The application that tunes itself: one emulated engine, a scheduler and its tuner with short slices."""

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from experiments.common.application import BUILD_APP
from serve_app.metrics.targets import ClassTarget, ClassTargets
from serve_app.scheduling.settings import WrittenScheduler
from serve_app.serving.tuner.actor import TunerSettings
from serve_app.settings_base import as_written
from serve_app.tuning.objective.objective import ObjectiveSettings

MODEL = "tuned"
PROFILE = "llama31-8b-rtx4090-tp1"
IMPORT_PATHS = {
    "defaults": BUILD_APP,
    "winner": BUILD_APP,
    "poisoned": "experiments.live_tuning.poisoned_tuner:build_app",
}
VERDICTS = {"defaults": "none", "winner": "adopted", "poisoned": "rolled back"}
"""What the tuner is expected to decide in each case."""

_TARGET = ClassTarget(ttft_s=0.5, long_ttft_s=5.0, tpot_s=None)
OBJECTIVE = ObjectiveSettings(targets=ClassTargets(default=_TARGET), min_requests=20)

_BAD_STARTS: Mapping[str, Mapping[str, Any]] = {
    # Those of `poisoned_tuner.AWFUL`, by the path of the setting.
    "winner": {
        "ewsjf": {"weights": {"a_u": 0.01, "b_u": 5.0, "a_f": -5e-5, "b_f": 0.5}},
        "isolation": {"max_long_prefills": 8, "max_longest_prefills": 8, "short_work_share": 0.6},
        "backpressure": {"target_waiting": 16},
    },
}


def model(case: str, slice_s: float) -> dict[str, Any]:
    """The model of a case: one starts from other values than the defaults.

    In the case `defaults` nothing is tuned.
    """
    start = _BAD_STARTS.get(case, {})
    engine = {"emulated": {"profile": PROFILE, "max_num_seqs": 16}}
    return {
        "name": MODEL,
        "pools": [{"name": "all", "engine": engine, "resources": {"num_cpus": 0.1}}],
        "scheduler": as_written(WrittenScheduler, {"policy": "ewsjf", **start}),
        "tuner": as_written(
            TunerSettings, {"parameters": _tuner(slice_s, "off" if case == "defaults" else "on")}
        ),
    }


def _tuner(slice_s: float, mode: str) -> dict[str, Any]:
    # No profile is named: the twin learns the engine from what it does.
    return {
        "calibration": {"every_s": 10.0},
        "every_s": slice_s,
        "min_requests": 250,
        "search_cpu_s": 8.0,
        "objective": {"targets": {"default": asdict(_TARGET)}, "min_requests": OBJECTIVE.min_requests},
        "twin": {"window_requests": 100, "block_requests": 50, "learned_requests": 100},
        "study": {"trials": 30, "rungs": [1, 2, 4], "confirm_windows": 8, "finalists": 1},
        "rollout": {
            "mode": mode,
            "max_step": 1.0,
            "slice_s": slice_s,
            "settle_s": 5.0,
            "pairs": 6,
            "min_class_requests": 30,
            "cool_down_s": 600.0,
            "failure_cool_down_s": 30.0,
        },
    }
