"""How well a stretch of traffic was served, as one number.

`objective` chooses between `slo_reward` (targets kept, the default) and `paper_reward` (EWSJF's own);
`service_class` says what is due to which request.
"""
