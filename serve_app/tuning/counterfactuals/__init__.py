"""Counterfactuals: the wait of one request if one thing had been different.

`recording` is the document of the minutes around a request, which a scheduler creates. `replay` plays it, or
a changed one, on simulated engines with the production scheduler. `what_if` fits the speed of the engines,
computes the error from the unchanged replay, and combines the results. `python -m
serve_app.tuning.counterfactuals` runs it in a separate process next to a gateway.
"""
