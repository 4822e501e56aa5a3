"""Supervisor: starts the host, shows its progress, and converts signals to a graceful shutdown.

- `Supervisor`: the rules of the shutdown, see below.
- `Console`: steps with their times, how to use the application, and the drain. On a terminal the current step
  is one line that is updated. Otherwise each line is written once, for logs.

Rules:

- The first SIGINT, SIGTERM or SIGHUP drains: new requests are rejected, in-flight ones completed.
- A second signal, or one before the application is ready, stops all processes immediately.
- If Ray's own processes do not start, they are ended and started once more.
- In all cases, no process of this instance and no open port is left behind.
"""

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import msgspec
from msgspec.structs import replace
from rich.console import Console as RichConsole
from rich.status import Status
from rich.text import Text

from serve_app.cli.command import program
from serve_app.cli.serve.instance import read_instance, write_instance
from serve_app.cli.serve.processes import (
    Drained,
    Draining,
    Failed,
    HostJob,
    HostMessage,
    Progress,
    Ready,
    StepBegun,
    Stop,
    become_subreaper,
    descendants,
    kill_descendants,
)
from serve_app.serving.access import ADMIN_KEY_FILE, RAY_TOKEN_VARIABLE

_STEPS = {
    "ray": "Ray and Ray Serve",
    "application": "application",
    "engines": "engines",
}
# Interval of repeated lines during a long step, without a terminal.
_REPEAT_S = 15.0
_WIDTH = 34


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchParameters:
    """Parameters of a start.

    Attributes:
        job: start arguments of the host.
        environment: environment of the host and its descendants.
        drain_s: time limit for in-flight requests when it is stopped.
        models: names of the served models.
        requires_key: whether requests need an API key.
        listen_address: listen address of the configuration, shown if it differs from the job's URL.
    """

    job: HostJob
    environment: Mapping[str, str]
    drain_s: float
    models: tuple[str, ...]
    requires_key: bool
    listen_address: str

    @property
    def log(self) -> Path:
        """File with the output of Ray and Ray Serve."""
        return Path(self.job.folder) / "serve.log"


class _Output(RichConsole):
    """Console that survives a closed output, for which Rich would end the program."""

    def on_broken_pipe(self) -> None:
        """Discard all further output."""
        self.quiet = True


class Console:
    """Output on standard error. A closed terminal does not stop the application."""

    def __init__(self) -> None:
        self._rich = _Output(file=sys.stderr, highlight=False, soft_wrap=True)
        self._began_at = time.monotonic()
        self._step = ""
        self._step_at = self._began_at
        self._last_printed_at = self._began_at
        self._printed: set[str] = set()
        self._status: Status | None = None

    @property
    def elapsed_s(self) -> float:
        """Seconds since the command began."""
        return time.monotonic() - self._began_at

    def line(self, text: str, style: str = "") -> None:
        """Print a permanent line."""
        with contextlib.suppress(OSError):
            self._rich.print(Text(text, style=style))

    def step(self, name: str) -> None:
        """Begin a step and end the previous one."""
        self.end_step()
        self._step, self._step_at = _STEPS.get(name, name), time.monotonic()
        self._last_printed_at = self._step_at
        self._show(f"{self._step} ...")

    def end_step(self) -> None:
        """End the current step."""
        self._hide()
        if self._step:
            self._done(self._step, time.monotonic() - self._step_at)
        self._step = ""

    def progress(self, progress: Progress) -> None:
        """Print deployments that became ready, each once, and show the others."""
        now = time.monotonic()
        for name in progress.ready:
            if name not in self._printed:
                self._printed.add(name)
                self._done(f"  {name} ready", now - self._step_at)
        if not progress.lines:
            return
        text = f"{', '.join(progress.lines)}, {now - self._step_at:.0f} s"
        self._show(text)
        if not self._rich.is_terminal and now - self._last_printed_at >= _REPEAT_S:
            self._last_printed_at = now
            self.line(f"  waiting: {text}")

    def ready(self, launch: LaunchParameters, dashboard: str | None) -> None:
        """Print how to use the application. `dashboard` is the URL of Ray's, if it runs."""
        self.end_step()
        url, folder = launch.job.url, Path(launch.job.folder)
        logs = _CLUSTER_LOGS if launch.job.address else folder / "ray/session_latest/logs"
        first = launch.models[0]
        key = " -H 'authorization: Bearer YOUR_KEY'" if launch.requires_key else ""
        body = f'{{"model": "{first}", "messages": [{{"role": "user", "content": "Hello"}}]}}'
        self.line(f"Ready after {self.elapsed_s:.1f} s.", "bold green")
        listening = "" if launch.listen_address == url else f"   (listening on {launch.listen_address})"
        self.line(f"  address    {url}/v1{listening}")
        self.line(f"  models     {', '.join(launch.models)}")
        curl = f"curl {url}/v1/chat/completions -H 'content-type: application/json'{key} -d '{body}'"
        self.line(f"  try        {curl}")
        self.line(f"  dashboard  {url}/dashboard   (key: {folder / ADMIN_KEY_FILE})")
        self.line(f"  status     {program()} status --url {url}")
        self.line(f"  logs       {logs}")
        self.line(f"  output     {launch.log}   (Ray and Ray Serve)")
        if dashboard:
            token = launch.environment.get(RAY_TOKEN_VARIABLE) or "ray get-auth-token"
            self.line(f"  Ray        {dashboard}   (token: {token})")
        self.line(
            f"  stop       Ctrl-C: in-flight requests have {launch.drain_s:g} s to complete; "
            "again to stop immediately"
        )

    def draining(self, open_requests: int, remaining_s: float) -> None:
        """Show the progress of a drain."""
        requests = "1 request" if open_requests == 1 else f"{open_requests} requests"
        text = f"stopping: {requests} in flight, {remaining_s:.0f} s left; Ctrl-C to stop immediately"
        self._show(text)
        now = time.monotonic()
        if not self._rich.is_terminal and now - self._last_printed_at >= _REPEAT_S / 3:
            self._last_printed_at = now
            self.line(text)

    def end(self) -> None:
        """Restore the terminal. A current step is not complete."""
        self._hide()
        self._step = ""

    def _done(self, what: str, seconds: float) -> None:
        self.line(f"{what:<{_WIDTH}} {seconds:6.1f} s")

    def _show(self, text: str) -> None:
        if not self._rich.is_terminal:
            return
        with contextlib.suppress(OSError):
            if self._status is None:
                self._status = self._rich.status(text, refresh_per_second=4)
                self._status.start()
            else:
                self._status.update(text)

    def _hide(self) -> None:
        status, self._status = self._status, None
        if status is not None:
            with contextlib.suppress(OSError):
                status.stop()


_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
# Time for Ray to exit after the drain. Remaining processes are killed.
_END_TIMEOUT_S = 10.0
_KILL_TIMEOUT_S = 20.0
# Time beyond the drain timeout after which the host counts as hung.
_DRAIN_MARGIN_S = 20.0
_EXIT_INTERRUPTED = 130
_CLUSTER_LOGS = "Ray's session folder on each node"


class Supervisor:
    """Foreground runner of one application. Use once: `Supervisor(...).run()`."""

    def __init__(self, launch: LaunchParameters, console: Console) -> None:
        self._launch = launch
        self._console = console
        self._host: asyncio.subprocess.Process | None = None
        self._signals = 0
        self._signalled = asyncio.Event()
        self._is_ready = False
        self._failure: Failed | None = None
        self._aborted = 0
        self._startup_s = 0.0

    async def run(self) -> int:
        """Serve until a signal arrives.

        Returns:
            The exit status: 0 if a signal ended it once it was ready, 1 if the application failed, 130 if a
            signal interrupted the start.
        """
        become_subreaper()
        self._console.line(f"output of Ray and Ray Serve: {self._launch.log}")
        loop = asyncio.get_running_loop()
        for each in _SIGNALS:
            # `nohup` ignores SIGHUP, so that its command survives the terminal.
            if each is not signal.SIGHUP or signal.getsignal(each) is not signal.SIG_IGN:
                loop.add_signal_handler(each, self._on_signal)
        reading = asyncio.create_task(self._read(await self._start_host()))
        try:
            await self._until_stopped(reading)
            if self._failure is not None and self._failure.is_transient and not self._signals:
                reading = await self._restart_host(self._failure)
                await self._until_stopped(reading)
        finally:
            self._console.end()
            await self._end_processes()
        if not reading.done():
            reading.cancel()
        if self._failure is not None:
            self._console.line(self._failure.reason, "red")
            self._console.line(f"For details see {self._launch.log} and {self._launch.job.folder}/ray.")
            return 1
        if self._is_ready:
            self._console.line("Stopped.")
        return 0 if self._is_ready else _EXIT_INTERRUPTED

    def _on_signal(self) -> None:
        self._signals += 1
        self._signalled.set()

    async def _start_host(self) -> asyncio.StreamReader:
        read_fd, write_fd = os.pipe()
        job = msgspec.json.encode(self._launch.job).decode()
        with self._launch.log.open("ab") as log:
            self._host = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", "serve_app.cli.serve.host", job, str(write_fd)),
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
                env=dict(self._launch.environment),
                # In a new session, which the terminal's signals do not reach.
                start_new_session=True,
                pass_fds=(write_fd,),
            )
        os.close(write_fd)
        reader = asyncio.StreamReader()
        await asyncio.get_running_loop().connect_read_pipe(
            lambda: asyncio.StreamReaderProtocol(reader), os.fdopen(read_fd, "rb")
        )
        return reader

    async def _restart_host(self, failure: Failed) -> asyncio.Task[None]:
        """Start again, with new processes."""
        self._console.end()
        self._console.line(f"{failure.reason}\nStarting Ray once more.", "yellow")
        self._failure = None
        await asyncio.to_thread(kill_descendants, _KILL_TIMEOUT_S)
        return asyncio.create_task(self._read(await self._start_host()))

    async def _read(self, messages: asyncio.StreamReader) -> None:
        """Process the host's messages until it ends."""
        while line := await messages.readline():
            self._on_message(msgspec.json.decode(line, type=HostMessage))

    def _on_message(self, message: HostMessage) -> None:
        console = self._console
        match message:
            case StepBegun(name):
                console.step(name)
            case Progress():
                console.progress(message)
            case Ready(ray_address, dashboard, missing):
                self._is_ready = True
                self._register(ray_address)
                self._startup_s = console.elapsed_s
                console.ready(self._launch, dashboard)
                if missing:
                    names = ", ".join(missing)
                    text = f"No server is found so far for {names}: `{program()} status` shows why."
                    console.line(text, "yellow")
            case Failed():
                self._failure = message
            case Draining(open_requests, remaining_s):
                console.draining(open_requests, remaining_s)
            case Drained(aborted):
                self._aborted = aborted

    def _register(self, ray_address: str) -> None:
        # `deploy` needs the address; all else works without it, even if the disk is full.
        with contextlib.suppress(OSError):
            write_instance(replace(read_instance(Path(self._launch.job.folder)), ray_address=ray_address))

    async def _until_stopped(self, reading: asyncio.Task[None]) -> None:
        signalled = asyncio.create_task(self._signalled.wait())
        await asyncio.wait({reading, signalled}, return_when=asyncio.FIRST_COMPLETED)
        signalled.cancel()
        if not self._is_ready and self._signals:
            self._console.line("Stopped before it was ready.")
        elif not self._signals:
            self._failure = self._failure or Failed(await self._unexpected_end())
        else:
            await self._drain(reading)

    async def _unexpected_end(self) -> str:
        assert self._host is not None
        status: int | None = None
        # The host's pipe is closed just before the process ends.
        with contextlib.suppress(TimeoutError):
            status = await asyncio.wait_for(self._host.wait(), 1.0)
        with_status = "" if status is None else f" with status {status}"
        return f"The process that runs Ray ended unexpectedly{with_status}."

    def _drain_s(self) -> float:
        """Return the time limit for in-flight requests, which `deploy` may have changed."""
        with contextlib.suppress(OSError):
            return read_instance(Path(self._launch.job.folder)).drain_s
        return self._launch.drain_s

    async def _drain(self, reading: asyncio.Task[None]) -> None:
        assert self._host is not None
        assert self._host.stdin is not None
        began_at, drain_s = time.monotonic(), self._drain_s()
        self._console.line(
            f"Stopping: new requests are rejected. In-flight requests have {drain_s:g} s to complete."
        )
        stop = Stop(drain_s, max(1.0, self._startup_s))
        with contextlib.suppress(ConnectionError):
            self._host.stdin.write(msgspec.json.encode(stop) + b"\n")
            await self._host.stdin.drain()
        self._signalled.clear()
        again = asyncio.create_task(self._signalled.wait())
        limit_s = drain_s + _DRAIN_MARGIN_S
        await asyncio.wait({reading, again}, timeout=limit_s, return_when=asyncio.FIRST_COMPLETED)
        again.cancel()
        self._console.end()
        seconds = time.monotonic() - began_at
        if self._signals > 1:
            self._console.line(
                f"A second signal stopped it after {seconds:.1f} s: any in-flight requests were aborted."
            )
        elif self._aborted:
            self._console.line(f"{self._aborted} in-flight requests were aborted with an error.")

    async def _end_processes(self) -> None:
        """End the host and its descendants."""
        host = self._host
        if host is None:
            return
        if self._signals < 2 and self._is_ready:
            # Wait for the host's processes to exit, so that none must be killed.
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(host.wait(), _END_TIMEOUT_S)
        if host.stdin is not None:
            host.stdin.close()
        if descendants():
            left = await asyncio.to_thread(kill_descendants, _KILL_TIMEOUT_S)
            if left:
                self._console.line(f"These processes could not be stopped; kill them manually: {left}", "red")
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(host.wait(), 1.0)
