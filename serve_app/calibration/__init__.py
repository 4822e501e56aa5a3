"""Calibration: the coefficients of the step-time model, from the request timestamps of a real engine.

Read `measurements.py` (what is measured, and which rows are refused), `replay.py` (the engine model plays
the same arrivals), `start.py` and `fit.py` (coefficients under which it plays them alike), then `accuracy.py`
(how far the played distributions are from the measured ones) and `command.py`
(`python -m serve_app calibrate`).
"""

from serve_app.calibration.accuracy import Accuracy, compare
from serve_app.calibration.fit import CalibrationFit, fit_step_time
from serve_app.calibration.measurements import MeasuredRequest, Measurements, read_measurements
from serve_app.calibration.replay import replay

__all__ = [
    "Accuracy",
    "CalibrationFit",
    "MeasuredRequest",
    "Measurements",
    "compare",
    "fit_step_time",
    "read_measurements",
    "replay",
]
