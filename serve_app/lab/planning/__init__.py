"""Fleet planning: the GPUs and pools for a workload and its latency limits, and what splitting a fleet saves.

A queueing model ranks fleets, and the simulator sizes the best of them with the project's own scheduler.
Read:

- `fleets`: the fleets that are compared, and their prices;
- `queueing` and `sizing`: the queueing model, sizes by it, and the closed forms of the sources;
- `verification`: the smallest fleet by the simulator;
- `plan`: the search for the cheapest fleet, from the workload to the result;
- `report` and `configuration`: the output; `command`: `python -m serve_app plan`.
"""
