"""HTTP/1.1 from a gateway to replicas.

`pool` keeps connections, `connection` is one of them, `response` its answer.
"""
