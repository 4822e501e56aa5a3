"""Accounting: explains waits, attributes engine time to tenants and takes snapshots of the queue.

Read `wait_causes` (the accounts of one request), then `waits` (attributes waits to causes after each event),
`costs` (divides engine time among requests) and `queue_snapshot` (a view of the queue for operators).
"""
