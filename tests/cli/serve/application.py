"""`ewsjf` as a user runs it, in a terminal that can be closed."""

import contextlib
import fcntl
import os
import pty
import signal
import subprocess
import sys
import termios
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import psutil
import yaml

from experiments.common.application import is_free

ROOT = Path(__file__).resolve().parents[3]
START_TIMEOUT_S = 200.0


class Terminal:
    """A terminal with a command as its foreground process.

    Attributes:
        output: the text so far.
    """

    def __init__(self, *words: str) -> None:
        self._screen, inside = pty.openpty()
        os.set_blocking(self._screen, False)
        self.output = ""
        # The arguments are our own.
        self.process = subprocess.Popen(
            [sys.executable, "-m", "serve_app", *words],
            cwd=ROOT,
            stdin=inside,
            stdout=inside,
            stderr=inside,
            env={**os.environ, "TERM": "xterm", "COLUMNS": "200", "RAY_raylet_start_wait_time_s": "120"},
            preexec_fn=_own_terminal,  # noqa: PLW1509 - a terminal is taken in the child
        )
        os.close(inside)
        self._family: list[psutil.Process] = []

    def read(self) -> str:
        """Return the output so far."""
        with contextlib.suppress(BlockingIOError, OSError):
            while text := os.read(self._screen, 65_536):
                self.output += text.decode("utf-8", "replace")
        return self.output

    def wait_for(self, text: str, timeout_s: float = START_TIMEOUT_S) -> None:
        """Wait for a text in the output."""
        deadline = time.monotonic() + timeout_s
        while text not in self.read():
            assert self.process.poll() is None, self.output
            assert time.monotonic() < deadline, self.output
            time.sleep(0.05)
        self._family = psutil.Process(self.process.pid).children(recursive=True)

    def type_interrupt(self) -> None:
        """Press Ctrl-C."""
        os.write(self._screen, b"\x03")

    def close(self) -> None:
        """Close the window: every process that the terminal controls gets SIGHUP."""
        os.close(self._screen)

    def ended(self, timeout_s: float) -> int:
        """Return the exit status."""
        deadline = time.monotonic() + timeout_s
        while self.process.poll() is None:
            assert time.monotonic() < deadline, self.output
            with contextlib.suppress(OSError):
                self.read()
            time.sleep(0.05)
        assert self.process.returncode is not None
        return self.process.returncode

    def processes_left(self) -> list[str]:
        """Return the names of its descendants that still run."""
        left = []
        for process in self._family:
            with contextlib.suppress(psutil.NoSuchProcess):
                if process.is_running() and process.status() != psutil.STATUS_ZOMBIE:
                    left.append(process.name())
        return left

    def kill(self) -> None:
        """Clean up after a failed test; the supervisor's processes end when it does."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            self.process.send_signal(signal.SIGINT)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(40)


def _own_terminal() -> None:
    os.setsid()
    # Under nohup the tests ignore SIGHUP, and `serve` would inherit that.
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    fcntl.ioctl(0, termios.TIOCSCTTY, 0)


def terminal(config: Path) -> contextlib.AbstractContextManager[Terminal]:
    """Run `serve` until the block ends."""
    return on_terminal("serve", str(config))


@contextlib.contextmanager
def on_terminal(*words: str) -> Iterator[Terminal]:
    """Run a command until the block ends."""
    opened = Terminal(*words)
    try:
        yield opened
    finally:
        opened.kill()


def listening(ports: tuple[int, ...]) -> list[int]:
    """Return the ports in use."""
    return [port for port in ports if not is_free(port)]


def configuration(folder: Path, port: int, *, drain_s: float, pools: Any = None) -> Path:
    """Write configs/local.yaml with changes to a file."""
    content: dict[str, Any] = yaml.safe_load((ROOT / "configs/local.yaml").read_text())
    content["http_options"]["port"] = port
    args: Mapping[str, Any] = content["applications"][0]["args"]
    args["gateways"]["drain_timeout_s"] = drain_s
    if pools is not None:
        args["models"][0]["pools"] = pools
    path = folder / "config.yaml"
    path.write_text(yaml.safe_dump(content))
    return path
