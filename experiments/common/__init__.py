"""Shared code of experiments. Read `experiment.py`, then `rows.py` and `tables.py`.

`run_command.py` and `tables_command.py` implement `experiments/run` and `experiments/tables`. Experiments
that start applications or engines find helpers in `application.py`, `processes.py` and `load_test`.
"""
