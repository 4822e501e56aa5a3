"""Workloads: traces from files and generators, for the simulator and the benchmark alike.

Read `trace` (what a workload is), `loaders` (public file formats), `arrivals`, `lengths` and `tenants` (what
generators are made of), `transform` (cut, merge, scale), then `catalog` (the names on the command line).
`streams` provides random numbers: one seed for a run and one named stream for each use.
"""
