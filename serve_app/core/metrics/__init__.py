"""Metrics of requests and runs: raw timestamps, and the figures computed from them.

Read `record` (one request), then `summary` (SLOs by class, and the figures of simulator, live run and load
test alike, and over seeds). All functions are pure: no clock, no input or output; the records are arguments.
"""
