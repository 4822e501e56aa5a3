"""Learned state on disk or in a bucket.

Read `store` (one document per learner), `calls` (without blocking an event loop) and `persister` (when a
state is written).
"""
