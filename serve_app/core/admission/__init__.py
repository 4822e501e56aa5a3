"""Admission: decides which requests may queue, and sets the `Retry-After` of those that are rejected.

`admission` checks each arriving request. It uses `wait_prediction`, `slot_rate` (before enough waits were
observed), `outages` and `key_limits`, and records the work of rejected requests in `retry_reservations`.
"""
