"""Routing: the length of a request, the pools that may serve it, and the reservations on each replica.

Read `estimation` (the token budget of a request), then `pools` (from a budget to pools) and
`request_routing`. `replica`, `replica_state` and `ledger` account for what each replica was sent, order
replicas by load, and forecast their KV caches. `observed` learns limits that engines do not report. `prefix`
indexes the cached prompts of replicas, and `prefill_cost` learns their speed. `snapshot` has the format of
learned state. All of it is pure.
"""
