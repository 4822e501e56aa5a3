"""Traces of requests, from the gateway to a collector."""
