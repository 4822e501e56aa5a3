"""A guard process that kills an engine's processes when their parent has died.

An engine of several processes relies on its parent to end it. A parent that gets SIGKILL (out of memory, a
lost node daemon, an operator) cannot do that, and an unreachable engine keeps gigabytes, or a GPU. The guard
is a small process that reads from a pipe. The kernel closes the pipe when the parent dies, however it dies,
and the guard then kills the processes that it was told of.
"""

import asyncio
import contextlib
import multiprocessing
import subprocess
from collections.abc import AsyncIterator

# Interval between looks for new children.
_POLL_S = 0.2
# Reads process ids, one a line, until the pipe is closed.
_SCRIPT = 'pids=; while read -r pid; do pids="$pids $pid"; done; [ -z "$pids" ] || kill -KILL $pids'


class OrphanGuard:
    """Kills the protected processes as soon as this process has died.

    No child of this process may inherit the pipe. That holds for children that are started with `subprocess`
    or by multiprocessing's `spawn`, not for plain forks.

    Attributes:
        protected: ids of the processes.
    """

    def __init__(self) -> None:
        self.protected: set[int] = set()
        self._shell: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start the guard, before the processes that it protects."""
        # A session of its own: a Ctrl-C on the terminal must not end the guard before its parent.
        self._shell = subprocess.Popen(  # noqa: S603 - a fixed script that reads numbers
            ["/bin/sh", "-c", _SCRIPT],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )

    def protect(self, pid: int) -> None:
        """Kill `pid` when this process dies; the guard must have been started."""
        assert self._shell is not None, "protect() before start()"
        assert self._shell.stdin is not None
        self.protected.add(pid)
        self._shell.stdin.write(b"%d\n" % pid)
        self._shell.stdin.flush()

    @contextlib.asynccontextmanager
    async def guarding_new_children(self) -> AsyncIterator[None]:
        """Start the guard, and protect every multiprocessing child that starts within the block.

        A child is protected within a fraction of a second, not only when the block ends, which may take
        minutes.
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
        """End the guard: the processes have ended, and others may get their ids."""
        shell, self._shell = self._shell, None
        if shell is None:
            return
        shell.kill()
        shell.wait()
        assert shell.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            shell.stdin.close()
