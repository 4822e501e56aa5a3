"""Calibration: the coefficients of the step-time model, from the request timestamps of a real engine.

Read `measurements` (the input, and the rows that are refused), `replay` (the engine model on the same
arrivals, and its errors), `fit` (the coefficients) and `command` (`python -m serve_app calibrate`).
"""
