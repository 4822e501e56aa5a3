"""What can be known of a configuration before Ray starts: everything wrong with a file, with line numbers.

Read `checks.py` first, which runs all checks in order. `serve_file.py` finds lines and knows the keys of Ray
Serve, `machine.py` asks this machine for ports, cores, GPUs and memory, and `engines.py` computes whether
engines can hold what is asked of them.
"""

from serve_app.settings.checking.checks import Checked, check_file
from serve_app.settings.checking.serve_file import Mistake

__all__ = ["Checked", "Mistake", "check_file"]
