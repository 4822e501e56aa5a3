"""The tuner beside a running scheduler.

`parameter_loop` is the state machine: it collects outcomes (`outcome_window`), searches
(`parameter_search`) and rolls a winner out (`rollout`) as trials of paired time slices (`canary`,
`slice_noise`, `control_variate`). `tuned_simulation` runs the same loop in the simulator.
"""
