"""The objective of tuning: how well traffic was served, as one number.

`objective` chooses between `slo_reward` (targets kept, the default) and `paper_reward` (EWSJF's own).
`service_class` says which targets apply to which request.
"""
