"""HTTP client of the data path: pooled connections to replicas, and responses while they arrive.

Read `pool` (which connection a request uses), `connection` (the protocol) and `response` (the answer).
"""
