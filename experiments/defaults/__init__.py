"""Defaults against other policies on twenty combinations of traffic and engines."""
