"""What a scrape shows of a scheduler beside its counters of decisions (`serving.scheduler.metrics`).

`queue_figures` and `pool_figures` look at the core when somebody asks: who waits where and why, what pools
could still take. `ended_requests` counts what requests have shown at their end: errors of estimates, routes
that were wrong, and what tenants have used. `tuner_figures` has what the tuner tells.
"""
