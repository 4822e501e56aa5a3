"""Accounting: explains waits, and attributes engine time to tenants.

Read `wait_causes` (the accounts of one request), then `waits` (attributes waits to causes after each event)
and `costs` (divides engine time among requests).
"""
