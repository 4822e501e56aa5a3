"""Pools that scale while they serve, against fixed fleets and other rules."""
