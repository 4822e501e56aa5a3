"""What experiments share. Read `experiment.py`, then `rows.py` and `tables.py`; the rest serves these three.

`run_command.py` and `tables_command.py` are behind `experiments/run` and `experiments/tables`. Experiments
that start applications or engines find helpers in `application.py`, `processes.py` and `open_loop.py`.
"""
