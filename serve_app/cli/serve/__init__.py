"""Starting and stopping an application: what `python -m serve_app serve` does.

Two processes share the work. The *supervisor* (`supervisor.py`) owns the terminal and the signals. The *host*
(`host.py`) owns Ray, in a session of its own, so a closed terminal or Ctrl-C never reaches Ray's processes
before the open answers have ended. They talk in the lines of `messages.py`. `environment.py` prepares what
Ray's processes inherit, `terminal` writes what the user sees, `processes.py` leaves no process behind.
"""
