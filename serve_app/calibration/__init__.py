"""Calibration: the coefficients of the step-time model, from the request timestamps of a real engine.

Read `measurements` (the input, and the rows that are refused), `replay` (the engine model on the same
arrivals), `start` and `fit` (the coefficients), `accuracy` (the errors on requests that were not fitted) and
`command` (`python -m serve_app calibrate`).
"""
