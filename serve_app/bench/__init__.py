"""How does a live endpoint do under load? An open-loop client, cheap enough not to be what is measured.

Read `bodies` (what is sent), `answer` (what is read from the answer), `connection` (HTTP at protocol level),
`load` (the open loop), `closed_loop` (a fixed number of clients, for overhead), `report` and `plots`,
`provenance`, and `command` (`python -m serve_app bench`).
"""
