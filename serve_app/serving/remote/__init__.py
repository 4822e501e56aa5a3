"""Pools of remote endpoints, found by discovery and watched by one process per pool.

Their engines run elsewhere, and gateways send requests to them directly. A watcher only discovers endpoints,
reads their load, and registers each of them at the scheduler. Read `sources` (how endpoints are found), then
`watcher` (one pool), `endpoint` (one endpoint, its control page, its identity, and how changes are damped)
and `settings`.
"""
