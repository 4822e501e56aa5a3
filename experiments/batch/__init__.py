"""Batch work beside interactive requests."""
