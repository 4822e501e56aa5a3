"""What is wrong with a running application: `python -m serve_app doctor`.

Read `trouble.py` first. `inspection.py` reads what the application tells of itself; `reachability.py`,
`replicas.py`, `load.py` and `history.py` find what is wrong with it, each in its own field.
"""
