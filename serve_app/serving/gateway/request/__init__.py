"""Parsing of a request before it is scheduled.

Reading order: `reader` (reads and checks a request), `endpoints` (fields by path), `fields` (shared parts of
bodies, and headers in both directions), `measure` (prompt sizes and prefix hashes), `body` (limits of bodies,
fields that are added to them, and multipart ones).
"""
