"""The tuner beside a running scheduler.

`parameter_loop` is the state machine. It collects outcomes (`outcome_window`), hands out searches
(`parameter_search`) and rolls a winner out (`rollout`, with `rollout_settings`). A trial of a step is a
`canary`: paired time slices, with the rules of the `trial_verdict`. Three modules separate the effect of a
step from that of the traffic: `slice_noise`, `control_variate`, and the `replay` of slices in the twin, which
`trial_replays` plans. `tuned_simulation` runs the same loop in the simulator.
"""
