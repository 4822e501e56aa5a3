"""Closed forms and the queueing model: estimates of a fleet without playing it.

`length_mix` holds a workload's lengths, `queueing` (over `erlang`) predicts a pool's latencies,
`closed_form` and `paper_model` are the sources' own formulas, for comparison.
"""
