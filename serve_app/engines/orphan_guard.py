"""Guard process that kills an engine's processes after their parent has died.

A parent that receives SIGKILL (out of memory, a lost node daemon, an operator) cannot stop the processes of
its engine, which then hold gigabytes of memory or a GPU. The guard is a small process that reads from a pipe.
The kernel closes the pipe however the parent dies, and the guard then kills the registered processes.
"""

import asyncio
import contextlib
import multiprocessing
import subprocess
from collections.abc import AsyncIterator

# Interval between checks for new child processes.
_POLL_S = 0.2
# Reads process ids, one per line, until the pipe is closed.
_SCRIPT = 'pids=; while read -r pid; do pids="$pids $pid"; done; [ -z "$pids" ] || kill -KILL $pids'


class OrphanGuard:
    """Guard that kills the protected processes as soon as this process has died.

    No child of this process may inherit the pipe. Children started by `subprocess` or by multiprocessing's
    `spawn` do not inherit it. Plain forks would.
    """

    def __init__(self) -> None:
        self.protected: set[int] = set()
        self._shell: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start the guard. Call this before starting the processes to protect."""
        # In a new session, because a Ctrl-C on the terminal must not end the guard before its parent.
        self._shell = subprocess.Popen(  # noqa: S603 - a fixed script that reads numbers
            ["/bin/sh", "-c", _SCRIPT],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )

    def protect(self, pid: int) -> None:
        """Kill `pid` when this process dies. Requires `start`."""
        assert self._shell is not None, "protect() before start()"
        assert self._shell.stdin is not None
        self.protected.add(pid)
        self._shell.stdin.write(b"%d\n" % pid)
        self._shell.stdin.flush()

    @contextlib.asynccontextmanager
    async def guarding_new_children(self) -> AsyncIterator[None]:
        """Start the guard and protect every multiprocessing child that starts within the block.

        Children are detected every 0.2 s, not only at the end of the block, which may take minutes.
        """
        known = {child.pid for child in multiprocessing.active_children()}

        def protect_new() -> None:
            for child in multiprocessing.active_children():
                if child.pid is not None and child.pid not in known:
                    known.add(child.pid)
                    self.protect(child.pid)

        async def poll() -> None:
            while True:
                protect_new()
                await asyncio.sleep(_POLL_S)

        self.start()
        polling = asyncio.create_task(poll())
        try:
            yield
            protect_new()
        finally:
            polling.cancel()

    def release(self) -> None:
        """Stop the guard. Required once the processes have ended, because the kernel may reuse their ids."""
        shell, self._shell = self._shell, None
        if shell is None:
            return
        shell.kill()
        shell.wait()
        assert shell.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            shell.stdin.close()
