"""Who ends an engine's processes when their parent was killed?

An engine of several processes relies on its parent to end it. A parent that gets SIGKILL (out of memory, a
lost node daemon, an impatient operator) ends nobody, and gigabytes, or a GPU, stay taken by an engine that
no one can reach. A tiny process beside it holds one end of a pipe; the kernel closes the other end whenever
the parent dies, however it dies, and then the guard kills what it was told to.
"""

import asyncio
import contextlib
import multiprocessing
import subprocess
from collections.abc import AsyncIterator

# How often new children are looked for.
_POLL_S = 0.2
# Reads process ids, one a line, until the pipe is closed.
_SCRIPT = 'pids=; while read -r pid; do pids="$pids $pid"; done; [ -z "$pids" ] || kill -KILL $pids'


class OrphanGuard:
    """Kills the processes named to it as soon as this process has died.

    It works as long as no child of this process inherits the pipe, which holds for all that are started with
    `subprocess` or by multiprocessing's `spawn`, not for plain forks.

    Attributes:
        protected: the ids named to it.
    """

    def __init__(self) -> None:
        self.protected: set[int] = set()
        self._shell: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start the guard, before the processes that it will guard."""
        # A session of its own: a Ctrl-C on the terminal must not take the guard away before its parent.
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
        """Start the guard, and protect every multiprocessing child that this process gets meanwhile.

        A child is named to the guard within a fraction of a second, not when the block ends: what starts in
        it may take minutes.
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
        """End the guard: the processes have ended by themselves, and others may get their ids."""
        shell, self._shell = self._shell, None
        if shell is None:
            return
        shell.kill()
        shell.wait()
        assert shell.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            shell.stdin.close()
