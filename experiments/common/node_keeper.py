"""Cluster node on this machine: `ray start --block` and its descendants as one process tree.

    python -m experiments.common.node_keeper ray start ...

The tree ends as a machine or a pod does: when its first process or the keeper's parent ends, the rest is
killed.
"""

import contextlib
import os
import subprocess
import sys
import threading

from serve_app.cli.serve.processes import become_subreaper, kill_descendants

_END_TIMEOUT_S = 30.0


def main() -> int:
    """Run the command of the arguments until it or standard input ends."""
    become_subreaper()
    # The arguments come from the experiment.
    first = subprocess.Popen(sys.argv[1:], stdin=subprocess.DEVNULL)
    threading.Thread(target=_end_with_starter, name="starter", daemon=True).start()
    status = _reap_until_ended(first.pid)
    kill_descendants(_END_TIMEOUT_S)
    return status


def _end_with_starter() -> None:
    # Unbuffered: a buffer's lock would be held when this process ends.
    while os.read(0, 1_024):
        pass
    kill_descendants(_END_TIMEOUT_S)
    os._exit(1)


def _reap_until_ended(pid: int) -> int:
    """Wait for one child, and for orphans that are adopted in between."""
    with contextlib.suppress(ChildProcessError):
        while True:
            ended, status = os.waitpid(-1, 0)
            if ended == pid:
                return os.waitstatus_to_exitcode(status)
    return 1


if __name__ == "__main__":
    sys.exit(main())
