"""Host process: owns Ray, deploys the application, and drains it at the end.

    python -m serve_app.cli.serve.host JOB FD

JOB is a `HostJob` as JSON. Commands arrive on standard input, messages are sent on descriptor FD, and
everything else that the process prints is Ray's output. The host exits when its standard input ends, so it
also ends if its supervisor is killed.
"""

import contextlib
import os
import queue
import sys
import threading
import time
import traceback
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import BinaryIO

import msgspec
import yaml

from serve_app.cli.serve.failures import RayStartError
from serve_app.cli.serve.processes import (
    Drained,
    Failed,
    HostJob,
    HostMessage,
    Ready,
    StepBegun,
    Stop,
    become_subreaper,
    children,
    kill_descendants,
    reap_orphans,
)
from serve_app.errors import ServeAppError

# Polling intervals of the controller during the start, and afterwards.
_START_POLL_S = 0.2
_RUN_POLL_S = 2.0
# Replicas that continue without a controller or a node cannot be distinguished from dead ones.
_LOST_AFTER_S = 30.0
_END_TIMEOUT_S = 20.0


class ApplicationHost:
    """Runner of one application from start to end, which writes `messages` to the supervisor."""

    def __init__(self, job: HostJob, messages: BinaryIO) -> None:
        self._job = job
        self._messages = messages
        self._content = yaml.safe_load(Path(job.config).read_text(encoding="utf-8"))
        # None means that the supervisor has exited.
        self._commands: queue.SimpleQueue[Stop | None] = queue.SimpleQueue()

    def run(self, commands: BinaryIO) -> int:
        """Start, watch and drain the application.

        Returns:
            The exit status: 1 if the application failed to start or was lost.
        """
        threading.Thread(target=self._read, args=(commands,), name="commands", daemon=True).start()
        try:
            self._start()
            stop = self._watch()
        except ServeAppError as exc:
            self._send(Failed(str(exc), is_transient=isinstance(exc, RayStartError)))
            return 1
        except Exception as exc:  # noqa: BLE001 - report every error to the user; the log has the traceback
            traceback.print_exc()
            self._send(Failed(f"The application did not start: {exc!r}"))
            return 1
        if stop is not None:
            self._send(Drained(self._cluster.drain(stop, self._send)))
        self._cluster.stop()
        return 0

    def _start(self) -> None:
        self._send(StepBegun("ray"))
        # Imported here, because Ray takes two seconds to import and the supervisor waits for a first message.
        from serve_app.cli.serve.cluster import Cluster, build  # noqa: PLC0415

        # Ray's start mostly waits for other processes, so the application's imports run in parallel. They
        # must not run in parallel with the import of Ray, which fails if two threads import it.
        application = ThreadPoolExecutor(1).submit(build, self._content)
        self._cluster = Cluster(self._job, self._content)
        self._cluster.start()
        # Later ones are orphans: of the application's processes.
        self._own = children()
        self._send(StepBegun("application"))
        self._cluster.deploy(application.result())
        self._send(StepBegun("engines"))
        while True:
            progress = self._cluster.progress()
            self._send(progress)
            missing = None if progress.lines else self._cluster.models_without_server()
            if missing is not None:
                break
            with contextlib.suppress(queue.Empty):
                self._commands.get(timeout=_START_POLL_S)
                raise ServeAppError("stopped before it was ready")
        self._cluster.connect()
        self._cluster.record()
        self._send(Ready(self._cluster.ray_address, self._cluster.dashboard, missing))

    def _watch(self) -> Stop | None:
        """Wait for a command. Return None if the supervisor exited without one.

        Raises:
            ServeAppError: Ray no longer responds.
        """
        responded_at = time.monotonic()
        while True:
            reap_orphans(self._own)
            with contextlib.suppress(queue.Empty):
                return self._commands.get(timeout=_RUN_POLL_S)
            if self._cluster.is_controller_alive():
                responded_at = time.monotonic()
            elif time.monotonic() - responded_at > _LOST_AFTER_S:
                raise ServeAppError(f"Ray has not responded for {_LOST_AFTER_S:.0f} s: see Ray's logs")

    def _read(self, commands: BinaryIO) -> None:
        for line in commands:
            self._commands.put(msgspec.json.decode(line, type=Stop))
        self._commands.put(None)

    def _send(self, message: HostMessage) -> None:
        try:
            self._messages.write(msgspec.json.encode(message) + b"\n")
            self._messages.flush()
        except BrokenPipeError:
            # The supervisor has exited; the end of standard input reports this as well.
            return


def main() -> int:
    """Run the host that a supervisor has started."""
    job = msgspec.json.decode(sys.argv[1], type=HostJob)
    become_subreaper()
    descriptor = int(sys.argv[2])
    # Ray's processes must not inherit the supervisor's pipe and hold it open.
    os.set_inheritable(descriptor, False)
    messages = os.fdopen(descriptor, "wb")
    status = ApplicationHost(job, messages).run(sys.stdin.buffer)
    messages.close()
    # Orphans of Ray are children of this process now, and a killed supervisor cannot end them.
    kill_descendants(_END_TIMEOUT_S)
    # Skip Ray's exit handlers, which wait for processes that have already exited.
    sys.stdout.flush()
    os._exit(status)


if __name__ == "__main__":
    main()
