"""Workloads: traces from files and generators, for simulator, planner and load tests.

Read `trace` (a workload, and how traces are cut, merged and scaled), `loaders` (public file formats),
`generators` (components of generated workloads), then `catalog` (the names on the command line).
"""
