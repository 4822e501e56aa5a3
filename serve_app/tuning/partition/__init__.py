"""Length queues learned from the traffic: Refine-and-Prune.

`strategic_loop` decides when to learn, from `length_sample` and `drift`; `refine_and_prune` (paper) and
`stable_refinement` (ours) learn; `online_adjustment` follows small shifts in between.
"""
