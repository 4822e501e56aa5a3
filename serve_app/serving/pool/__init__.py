"""The pool replica process: one engine, served on a port of its own.

Read `replica` (life cycle, reports and draining), then `guard` (the token and counts in front of the engine),
`server` (HTTP), `deployment` (the replica in Ray Serve) and `autoscaling` (the number of replicas).
"""
