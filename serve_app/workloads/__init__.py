"""Which requests come, and when: traces from files and generators, for the simulator and the benchmark alike.

Read `trace` (what a workload is), `loaders` (public file formats), `arrivals`, `lengths` and `tenants` (what
generators are made of), `transform` (cut, merge, scale), `catalog` (the names that the command line knows).
Chance comes from `streams`: one seed for a run, one named stream for each use, so that drawing more of one
thing changes nothing else.
"""
