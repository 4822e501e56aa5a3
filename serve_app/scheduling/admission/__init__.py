"""Who may wait, and what the others are told.

`admission` decides at the door. It asks `wait_prediction`, which rests on `drain_rate`, and keeps the
promises that refused clients were given in `retry_reservations`, where every `Retry-After` is computed.
"""
