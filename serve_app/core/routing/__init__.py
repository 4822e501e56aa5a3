"""Routing: the length of a request, the pools that may serve it, and what each replica holds.

Read `estimation` (the token budget of a request), then `pools` and `adaptive_b_short` (from a budget to
pools). `replica`, `replica_state`, `ledger` and `open_replicas` account for what each replica was sent.
`observed` learns what engines do not tell. `prefix` tells what replicas have cached, `prefill_cost` how long
prefills take. All of it is pure, and O(1) for each request.
"""
