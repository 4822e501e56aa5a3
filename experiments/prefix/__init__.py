"""Prefix affinity on conversations."""
