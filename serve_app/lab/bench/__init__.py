"""Open-loop load generator for a live endpoint, cheap enough not to distort its measurements.

Read `connection` (HTTP at protocol level, and parsing of responses), `load` (bodies and the open loop) and
`report` (output).
"""
