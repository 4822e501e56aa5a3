"""Grafana dashboards, written by `scripts/docs generate`: a module for each, and `panels` builds the JSON.

The alerts and the scrape settings beside them in `configs/observability` are written by hand. The chart gets
a copy of all, since a chart can read only what is in its own folder.
"""
