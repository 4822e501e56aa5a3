"""A running application, as others find it on this machine: one small file per port."""

import contextlib
import os
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path

import msgspec
import psutil


class Instance(msgspec.Struct, kw_only=True, frozen=True):
    """One application that was started here.

    Attributes:
        pid: of its supervisor; SIGTERM stops it in good order.
        started_at: of that process, in seconds since 1970; process ids are used again.
        url: of its API, without `/v1`.
        config: path of its configuration.
        folder: where its logs and Ray's files lie.
    """

    pid: int
    started_at: float
    url: str
    config: str
    folder: str

    def is_running(self) -> bool:
        """Whether its supervisor lives."""
        with contextlib.suppress(psutil.Error):
            return abs(psutil.Process(self.pid).create_time() - self.started_at) < 1.0
        return False


def publish(url: str, config: Path, folder: Path) -> None:
    """Tell others of this process's application."""
    me = psutil.Process()
    instance = Instance(
        pid=me.pid,
        started_at=me.create_time(),
        url=url,
        config=str(config.resolve()),
        folder=str(folder),
    )
    _file(folder).write_bytes(msgspec.json.encode(instance))


def withdraw(folder: Path) -> None:
    """The application has ended."""
    _file(folder).unlink(missing_ok=True)


def running_instances() -> Iterator[Instance]:
    """The applications of this user that run on this machine."""
    base = Path(tempfile.gettempdir()) / f"ewsjf-{os.getuid()}"
    for file in sorted(base.glob("*/instance.json")):
        with contextlib.suppress(OSError, msgspec.MsgspecError):
            instance = msgspec.json.decode(file.read_bytes(), type=Instance)
            if instance.is_running():
                yield instance


def instance_at(url: str, running: Iterable[Instance]) -> Instance | None:
    """Return the application at an address in any spelling, or None if there is none."""
    named = url.rstrip("/").removesuffix("/v1").replace("//localhost", "//127.0.0.1")
    return next((each for each in running if each.url.rstrip("/") == named), None)


def _file(folder: Path) -> Path:
    return folder / "instance.json"
