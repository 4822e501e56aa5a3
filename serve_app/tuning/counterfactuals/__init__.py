"""Counterfactuals: what the wait of one request would have been, had one thing been different.

`recording` is the document of the minutes around a request, as a scheduler draws it up. `replay` plays it, or
a changed one, on simulated engines with the production scheduler. `what_if` fits how fast the engines are,
computes the error bar from the unchanged replay, and puts all of it together. `python -m
serve_app.tuning.counterfactuals` does that beside a gateway.
"""
