"""Pools of endpoints: engines that run elsewhere, found by discovery and watched by one process per pool.

Gateways send requests to endpoints themselves. So nothing of a request passes through here: a watcher only
finds the endpoints, reads their load, and stands for each of them at the scheduler.
"""
