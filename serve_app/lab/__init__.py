"""Lab: simulation, planning and calibration.

Read `simulation` first: it drives the production scheduler on the engine model. `workloads` has the traces,
`planning` and `calibration` use the simulator. `tables` formats the results of all commands for a terminal,
and `provenance` records the origin of a result.
"""
