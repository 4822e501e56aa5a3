"""Validation of a configuration before Ray starts: all mistakes in a file, with line numbers.

Read `checks.py` first, which runs all checks in order. `serve_file.py` finds lines and validates Ray Serve's
keys, `machine.py` checks this machine's ports, cores, GPUs and memory, and `engines.py` computes whether
engines have the capacity that a configuration requires.
"""

from serve_app.settings.checking.checks import CheckResult, check_file
from serve_app.settings.checking.serve_file import Mistake

__all__ = ["CheckResult", "Mistake", "check_file"]
