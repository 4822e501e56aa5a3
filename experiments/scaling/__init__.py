"""Pools that are scaled while they serve, against fixed fleets and other rules."""
