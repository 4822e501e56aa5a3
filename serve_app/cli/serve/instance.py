"""Registry of running applications on this machine: one small file per port."""

import contextlib
from collections.abc import Iterable, Iterator
from pathlib import Path

import msgspec
import psutil

from serve_app.cli.serve.environment import instances_folder


class Instance(msgspec.Struct, kw_only=True, frozen=True):
    """A running application that was started on this machine.

    Attributes:
        pid: process id of the supervisor; SIGTERM stops it gracefully.
        started_at: start of that process, as a Unix time in seconds, because process ids are reused.
        url: base URL of the API, without `/v1`.
        folder: folder with its logs and Ray's files.
    """

    pid: int
    started_at: float
    url: str
    config: str
    folder: str

    def is_running(self) -> bool:
        """Return whether the supervisor is alive."""
        with contextlib.suppress(psutil.Error):
            return abs(psutil.Process(self.pid).create_time() - self.started_at) < 1.0
        return False


def register(url: str, config: Path, folder: Path) -> None:
    """Register this process's application."""
    me = psutil.Process()
    instance = Instance(
        pid=me.pid,
        started_at=me.create_time(),
        url=url,
        config=str(config.resolve()),
        folder=str(folder),
    )
    _file(folder).write_bytes(msgspec.json.encode(instance))


def unregister(folder: Path) -> None:
    """Unregister an application that has ended."""
    _file(folder).unlink(missing_ok=True)


def running_instances() -> Iterator[Instance]:
    """Yield the running applications of this user on this machine."""
    for file in sorted(instances_folder().glob("*/instance.json")):
        with contextlib.suppress(OSError, msgspec.MsgspecError):
            instance = msgspec.json.decode(file.read_bytes(), type=Instance)
            if instance.is_running():
                yield instance


def instance_at(url: str, running: Iterable[Instance]) -> Instance | None:
    """Return the application at an address, in any notation; None if there is none."""
    named = url.rstrip("/").removesuffix("/v1").replace("//localhost", "//127.0.0.1")
    return next((each for each in running if each.url.rstrip("/") == named), None)


def _file(folder: Path) -> Path:
    return folder / "instance.json"
