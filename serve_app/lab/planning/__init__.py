"""Fleet planning: finds the GPUs and pools for a workload and its latency limits, and the saving by a split.

A queueing model ranks fleets, and the simulator sizes the best of them with the production scheduler.

- `queueing`: the fleets that are compared, their prices, the queueing model, and sizes derived from it.
- `verification`: the smallest fleet in the simulator.
- `plan`: the search for the cheapest fleet, from the workload to the result, and the output.
"""
