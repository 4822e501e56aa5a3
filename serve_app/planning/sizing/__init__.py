"""The search for the cheapest fleet that meets latency limits.

`fleets` defines the fleets that are compared, `costs` their prices, and `candidates` the input and the output
of a search. `modelled` sizes a fleet by the queueing model, `verification` measures one in the simulator, and
`smallest` finds the smallest size that passes. `search` combines them.
"""
