"""Admission: which requests may wait, and the `Retry-After` of those that may not.

`admission` checks each arriving request. It asks `wait_prediction`, which rests on `drain_rate`, and keeps
the reservations of refused requests in `retry_reservations`.
"""
