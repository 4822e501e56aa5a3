"""Metrics of requests and runs: raw timestamps, and the figures computed from them.

Read `record` (one request), `slo` (whether it met its limits), `targets` (SLOs by class), `summary` (the
figures of simulator, live run and load test alike), then `confidence` (figures over seeds). All functions are
pure: no clock, no input or output; the records are arguments.
"""
