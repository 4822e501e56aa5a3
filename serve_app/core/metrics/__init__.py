"""Measurements of requests and runs: raw timestamps first, figures after.

Read `record` (one request), `slo` (when it was served well), `targets` (SLOs by class), `summary` (the
figures of simulator, live run and benchmark alike), then `confidence` (figures over seeds). Pure: no clock,
no input or output; the records are arguments.
"""
