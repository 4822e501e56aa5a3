"""An open-loop load client for a live endpoint, cheap enough not to distort what it measures.

Read `bodies` (requests), `connection` (HTTP at protocol level), `answer` (reading answers), `load` (the open
loop), `endpoint` (models and engine metrics of the endpoint), `report` and `plots` (output), and `command`
with `arguments` (`python -m serve_app bench`). Two endpoints in turns: `interleave` (the runs), `comparison`
(the statistics), `compare_report` and `compare_command`.
"""
