"""Length queues learned from the traffic, by Refine-and-Prune.

`strategic_loop` keeps the last lengths and decides when to learn from them, by a test for `drift`, and
whether the result differs enough. `refine_and_prune` holds the steps: `gaps` (coarse, refine),
`stable_refinement` (our variant) and `utility` (prune); `settings` has every open point of the sources as a
switch. `online_adjustment` follows small shifts between full runs.
"""
