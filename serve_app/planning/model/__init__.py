"""Estimates of a fleet without a simulation.

`length_mix` holds the lengths of a workload. `queueing` predicts the latencies of a pool (`performance`),
over the formulas in `erlang`. `closed_form` and `paper_model` are the formulas of the sources, for
comparison.
"""
