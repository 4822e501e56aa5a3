"""Parsing of a request before it is scheduled.

Reading order: `incoming` (a request, and the job built from it), `reader` (reads and checks the body),
`endpoints` (fields by path), `fields` (shared parts of bodies), `measure` (prompt sizes), `prefix` (prefix
hashes), `form` (multipart bodies). `body` limits bodies, and `headers` translates headers in both directions.
"""
