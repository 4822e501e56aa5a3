"""Workloads: traces from files and generators, for simulator, planner and load tests.

Read `trace` (a workload, how traces are cut, merged and scaled, and public file formats), then `catalog`
(generated workloads, and the names on the command line).
"""
