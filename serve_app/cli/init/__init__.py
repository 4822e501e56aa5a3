"""A first configuration: what `python -m serve_app init` asks and writes.

`document.py` has what may be there to answer requests, and writes the file for it; `command.py` asks a person
at a terminal. `local.yaml` is the configuration that needs nothing.
"""
