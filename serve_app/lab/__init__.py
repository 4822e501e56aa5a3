"""Lab: simulation, planning, calibration, load tests and reports.

Read `simulation` first: it drives the production scheduler on the engine model. `workloads` has the traces,
`planning` and `calibration` use the simulator, and `bench` measures a live endpoint. `reports` writes any
result as one HTML file, with its `provenance`.
"""
