"""Malformed bodies beside other clients' requests."""
