"""Admission: decides which requests may queue, and sets the `Retry-After` of those that are rejected.

`admission` checks each arriving request, and records outages and the work of rejected requests. It uses
`wait_prediction` and `key_limits`.
"""
