"""A first configuration: what `python -m serve_app init` asks and writes.

Read `fleet.py` first, what may be there to answer requests. `questions.py` asks a person for it, `servers.py`
asks servers that run already. `document.py` writes the file, with the pools of `gpus.py` and `remote.py`;
`packaged.py` has the configuration that needs nothing.
"""
