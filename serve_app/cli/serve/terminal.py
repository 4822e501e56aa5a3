"""Terminal output of `serve`: steps with their times, how to use the application, and the drain.

On a terminal the current step is one line that is updated. Otherwise each line is written once, for logs.
"""

import contextlib
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass

from rich.console import Console as RichConsole
from rich.status import Status
from rich.text import Text

from serve_app.cli.command import program
from serve_app.cli.serve.messages import Progress

_STEPS = {
    "ray": "Ray and Ray Serve",
    "application": "application",
    "engines": "engines",
}
# Interval of repeated lines during a long step, without a terminal.
_REPEAT_S = 15.0
_WIDTH = 34


@dataclass(frozen=True, slots=True, kw_only=True)
class ConnectionInfo:
    """Connection details of an application that is ready.

    Attributes:
        listen_address: listen address of the configuration, shown if it differs from `url`.
        requires_key: whether clients need a key.
        output: file with the output of Ray and Ray Serve.
        key_file: file with the application's admin key.
        ray_token: file with the token of Ray; empty for that of `ray get-auth-token`.
    """

    url: str
    listen_address: str
    models: Sequence[str]
    requires_key: bool
    logs: str
    output: str
    key_file: str
    drain_s: float
    dashboard: str | None
    ray_token: str


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

    def ready(self, info: ConnectionInfo) -> None:
        """Print how to use the application."""
        self.end_step()
        first = info.models[0]
        key = " -H 'authorization: Bearer YOUR_KEY'" if info.requires_key else ""
        body = f'{{"model": "{first}", "messages": [{{"role": "user", "content": "Hello"}}]}}'
        self.line(f"Ready after {self.elapsed_s:.1f} s.", "bold green")
        listening = "" if info.listen_address == info.url else f"   (listening on {info.listen_address})"
        self.line(f"  address    {info.url}/v1{listening}")
        self.line(f"  models     {', '.join(info.models)}")
        curl = f"curl {info.url}/v1/chat/completions -H 'content-type: application/json'{key} -d '{body}'"
        self.line(f"  try        {curl}")
        self.line(f"  dashboard  {info.url}/dashboard   (key: {info.key_file})")
        self.line(f"  status     {program()} status --url {info.url}")
        self.line(f"  logs       {info.logs}")
        self.line(f"  output     {info.output}   (Ray and Ray Serve)")
        if info.dashboard:
            self.line(f"  Ray        {info.dashboard}   (token: {info.ray_token or 'ray get-auth-token'})")
        self.line(
            f"  stop       Ctrl-C: in-flight requests have {info.drain_s:g} s to complete; "
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
