"""Workloads: traces from files and generators, for the simulator and the benchmark alike.

Read `trace` (what a workload is, and how traces are cut, merged and scaled), `loaders` (public file formats),
`generators` (what generated workloads are made of), then `catalog` (the names on the command line).
"""
