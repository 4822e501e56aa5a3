"""Latency targets: how many are met, who pays for it, and whether the refusals are right."""
