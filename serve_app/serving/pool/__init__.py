"""A pool replica process.

`replica` owns an engine, `server` serves it, `guard` protects it, `autoscaling` sizes the pool.
"""
