"""What was measured, and what it means: raw timestamps first, figures after.

Read `record` (one request), `slo` (when it was served well), `statistics` (mean and percentiles),
`fairness`, `summary` (the figures that the simulator, a live run and a benchmark all report), `confidence`.
Pure: no clock, no input or output; whoever measures hands in the records.
"""
