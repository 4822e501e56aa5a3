"""Workloads: traces from files and generators, for the simulator and the benchmark.

Read `trace` (a workload, and how traces are cut, merged and scaled), `loaders` (public file formats),
`generators` (components of generated workloads), then `catalog` (the names on the command line).
"""
