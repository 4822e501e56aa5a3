"""The laboratory: simulation, planning, calibration, load tests and reports.

Read `simulation` first: it drives the production scheduler on the engine model. `workloads` has the traces,
`planning` and `calibration` use the simulator, `bench` measures a live endpoint, `counterfactuals` replays
recorded minutes, and `reports` turns any result into one HTML file.
"""
