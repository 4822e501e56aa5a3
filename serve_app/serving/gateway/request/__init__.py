"""Parsing of a request before it is scheduled.

Reading order: `incoming` (a request, and the job built from it), `reader` (reads and checks the body),
`endpoints` (fields by path), `fields` (shared parts of bodies, and headers in both directions), `measure`
(prompt sizes and prefix hashes), `body` (limits of bodies, and multipart ones).
"""
