"""How many GPUs, in which pools, and what is saved by splitting? Sized by a model, verified by the simulator.

To read: `closed_form` (what a split saves, in three lines), `erlang` and `queueing` (a pool from an engine's
step times), `paper_model` (the papers' engine), `fleets` (what is compared), `sizing` (by the model),
`verification` and `smallest` (by the simulator, with the project's scheduler), `search` (the cheapest of
all), `plan` (all of it in order), `results` and `plots`. `costs` is the table of GPU prices.
"""
