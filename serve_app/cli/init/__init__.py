"""Command `init`: writes a first configuration, interactively or from options.

`document.py` describes the engines and writes the file; `command.py` prompts the user. `local.yaml` is the
configuration without any requirements.
"""
