"""What the user of `serve` sees: steps with their times, the way in once it is ready, how a stop goes on.

On a terminal the present step is one line that changes; elsewhere every line is written once, for logs.
"""

import contextlib
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass

from rich.console import Console as RichConsole
from rich.status import Status
from rich.text import Text

from serve_app.launch.messages import Progress

_STEPS = {
    "ray": "Ray and Ray Serve",
    "application": "application",
    "engines": "engines",
}
# Outside a terminal a step that lasts is told of so often.
_REPEAT_S = 15.0
_WIDTH = 34


@dataclass(frozen=True, slots=True, kw_only=True)
class WayIn:
    """How to use an application that is ready.

    Attributes:
        listens: the address of its configuration, where that is not the one to use.
        keys: whether callers need a key.
        output: the file that has what Ray and Ray Serve write.
        key_file: the file with the application's own admin key.
    """

    url: str
    listens: str
    models: Sequence[str]
    keys: bool
    logs: str
    output: str
    key_file: str
    drain_s: float
    dashboard: str | None


class _Output(RichConsole):
    """Rich ends the program when nobody reads its output any more; an application goes on."""

    def on_broken_pipe(self) -> None:
        """Write nothing any more."""
        self.quiet = True


class Console:
    """Writes to standard error, and survives that nobody reads it: a closed terminal stops nothing."""

    def __init__(self) -> None:
        self._rich = _Output(file=sys.stderr, highlight=False, soft_wrap=True)
        self._began_at = time.monotonic()
        self._step = ""
        self._step_at = self._began_at
        self._told_at = self._began_at
        self._told: set[str] = set()
        self._status: Status | None = None

    @property
    def elapsed_s(self) -> float:
        """Since the command began."""
        return time.monotonic() - self._began_at

    def line(self, text: str, style: str = "") -> None:
        """One line that stays."""
        with contextlib.suppress(OSError):
            self._rich.print(Text(text, style=style))

    def step(self, name: str) -> None:
        """A step begins, which ends the one before."""
        self.end_step()
        self._step, self._step_at = _STEPS.get(name, name), time.monotonic()
        self._told_at = self._step_at
        self._show(f"{self._step} ...")

    def end_step(self) -> None:
        """The present step is done."""
        self._hide()
        if self._step:
            self._done(self._step, time.monotonic() - self._step_at)
        self._step = ""

    def progress(self, progress: Progress) -> None:
        """Deployments become ready, each told of once."""
        now = time.monotonic()
        for name in progress.ready:
            if name not in self._told:
                self._told.add(name)
                self._done(f"  {name} ready", now - self._step_at)
        if not progress.lines:
            return
        text = f"{', '.join(progress.lines)}, {now - self._step_at:.0f} s"
        self._show(text)
        if not self._rich.is_terminal and now - self._told_at >= _REPEAT_S:
            self._told_at = now
            self.line(f"  waiting: {text}")

    def ready(self, way_in: WayIn) -> None:
        """The application answers: how to use it."""
        self.end_step()
        first = way_in.models[0]
        key = " -H 'authorization: Bearer YOUR_KEY'" if way_in.keys else ""
        body = f'{{"model": "{first}", "messages": [{{"role": "user", "content": "Hello"}}]}}'
        self.line(f"Ready after {self.elapsed_s:.1f} s.", "bold green")
        listens = "" if way_in.listens == way_in.url else f"   (listens on {way_in.listens})"
        self.line(f"  address  {way_in.url}/v1{listens}")
        self.line(f"  models   {', '.join(way_in.models)}")
        curl = f"curl {way_in.url}/v1/chat/completions -H 'content-type: application/json'{key} -d '{body}'"
        self.line(f"  try      {curl}")
        self.line(f"  page     {way_in.url}/dashboard   (its key: {way_in.key_file})")
        self.line(f"  state    python -m serve_app status --url {way_in.url}")
        self.line(f"  logs     {way_in.logs}")
        self.line(f"  output   {way_in.output}   (of Ray itself)")
        if way_in.dashboard:
            self.line(f"  Ray      {way_in.dashboard}   (its token: ray get-auth-token)")
        self.line(
            f"  stop     Ctrl-C: open answers may end, for {way_in.drain_s:g} s at most; again: at once"
        )

    def live(self, text: str) -> None:
        """The state of a running application, on a terminal only."""
        self._show(text)

    def draining(self, open_requests: int, left_s: float) -> None:
        """How a stop goes on."""
        answers = "1 answer is" if open_requests == 1 else f"{open_requests} answers are"
        text = f"stopping: {answers} open, {left_s:.0f} s left; again to end at once"
        self._show(text)
        now = time.monotonic()
        if not self._rich.is_terminal and now - self._told_at >= _REPEAT_S / 3:
            self._told_at = now
            self.line(text)

    def end(self) -> None:
        """Leave the terminal as it was."""
        self._hide()

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
