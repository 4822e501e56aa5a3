"""HTTP client of the data path: pooled connections to replicas, and responses while they arrive.

Read `pool` (which connection a request uses, and which replicas are halted), then `connection` (the protocol,
and the answer).
"""
