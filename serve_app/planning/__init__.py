"""Fleet planning: the GPUs and pools for a workload and its latency limits, and what splitting a fleet saves.

A queueing model ranks fleets, and the simulator sizes the best of them with the project's own scheduler.
Read:

- `plan`: one plan from the workload to the result;
- `model`: closed forms and the queueing model;
- `sizing`: the fleets, their prices, and the search for the cheapest one;
- `results` and `plots`: the output; `command` and `arguments`: `python -m serve_app plan`.
"""
