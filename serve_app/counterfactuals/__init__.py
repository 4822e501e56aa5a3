"""Counterfactuals: what the wait of one request would have been, had one thing been different.

`recording` is the document of the minutes around a request, as a scheduler draws it up. `replay` plays it on
simulated engines with the production scheduler, `engines` says how fast those are. `changes` lists the things
that may differ, each a changed recording. `error_bar` is what the unchanged replay got wrong, and `what_if`
puts all of it together. `python -m serve_app.counterfactuals` does that beside a gateway.
"""
