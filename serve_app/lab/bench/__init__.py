"""An open-loop load client for a live endpoint, cheap enough not to distort what it measures.

Read `connection` (HTTP at protocol level, and how answers are read), `load` (bodies and the open loop),
`report` (output), `comparison` (two endpoints in turns, and the statistics of their difference), and
`command` (`python -m serve_app bench`).
"""
