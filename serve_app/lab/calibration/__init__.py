"""Calibration: fits the coefficients of the step-time model to request timestamps of a real engine.

Read `measurements` (the input and its validation), `replay` (the engine model on the same arrivals, and its
errors) and `fit` (the coefficients).
"""
