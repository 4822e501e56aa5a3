"""Open-loop load generator for a live endpoint, cheap enough not to distort its measurements.

Read `response` (parsing of responses), then `open_loop` (bodies and the open loop).
"""
