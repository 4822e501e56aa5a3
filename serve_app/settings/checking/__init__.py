"""Validation of a configuration before Ray starts: all mistakes in a file, with line numbers.

Read `checks.py` first, which runs all checks in order. `document.py` finds lines, and `serve_keys.py` checks
Ray Serve's keys. `machine.py` checks this machine's ports, cores, GPUs and memory, and `engines.py` the
arguments, model folders and remote servers of engines. `capacity.py` computes whether engines have the
capacity that a configuration requires.
"""

from serve_app.settings.checking.checks import CheckResult, check_file
from serve_app.settings.checking.document import Mistake

__all__ = ["CheckResult", "Mistake", "check_file"]
