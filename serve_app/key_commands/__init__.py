"""The command `python -m serve_app keys`: files of API keys, and what was used with each key.

Read `command.py`, then `usage.py`.
"""
