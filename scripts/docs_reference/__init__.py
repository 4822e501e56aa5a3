"""Reference pages of the documentation, generated from the code that they describe.

Each module renders one page: `configuration` (settings classes), `command_line` (argparse), `metrics`
(Prometheus registries), `endpoints` and `outcomes` (the gateway's tables). `source_text` reads docstrings and
comments; `pages` lists the pages. `scripts/docs generate` writes them, and a test fails if a page in
docs/reference is outdated.
"""
