"""Registry of the applications that run on this machine: one small file per port.

It also has the folder of an instance, and the environment that Ray's processes inherit.
"""

import contextlib
import os
import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from urllib.parse import urlsplit

import msgspec
import psutil

from serve_app.errors import ServeAppError

_SETTINGS = Path(__file__).with_name("serve.env")


def instances_folder() -> Path:
    """Return the folder of this user's instances.

    `tempfile.gettempdir` would choose another one while the disk of the usual one is full.
    """
    named = (os.environ.get(name) for name in ("TMPDIR", "TEMP", "TMP"))
    base = next((path for path in named if path and Path(path).is_dir()), "/tmp")  # noqa: S108 - as tempfile
    return Path(base) / f"ewsjf-{os.getuid()}"


def instance_folder(port: int) -> Path:
    """Return the folder of an instance. It is short, because Ray's socket paths have at most 107 bytes."""
    return instances_folder() / str(port)


def default_settings() -> dict[str, str]:
    """Return the Ray Serve settings for this application, parsed like a shell does."""
    words = shlex.split(_SETTINGS.read_text(encoding="utf-8"), comments=True)
    return dict(word.split("=", 1) for word in words)


def environment(given: Mapping[str, str]) -> dict[str, str]:
    """Return the environment of the host and its processes; `given` takes precedence over defaults."""
    inherited = dict(given)
    # A dozen processes import the same thousand modules, so cache their bytecode, whatever a container image
    # sets.
    inherited.pop("PYTHONDONTWRITEBYTECODE", None)
    return default_settings() | inherited


class Instance(msgspec.Struct, kw_only=True, frozen=True):
    """A running application that was started on this machine.

    Attributes:
        pid: process id of the supervisor; SIGTERM stops it gracefully.
        started_at: start of that process, as a Unix time in seconds, because process ids are reused.
        url: base URL of the API, without `/v1`.
        config: file of its settings.
        folder: folder with its logs and Ray's files.
        drain_s: time limit for in-flight requests when it is stopped.
        ray_address: address of its Ray cluster; empty until it is ready.
        models: names that clients may request; empty if a release before 0.4 started it.
    """

    pid: int
    started_at: float
    url: str
    config: str
    folder: str
    drain_s: float = 600.0
    ray_address: str = ""
    models: tuple[str, ...] = ()

    @property
    def port(self) -> int:
        """The port of `url`."""
        return urlsplit(self.url).port or 0

    def is_running(self) -> bool:
        """Return whether the supervisor is alive."""
        with contextlib.suppress(psutil.Error):
            return abs(psutil.Process(self.pid).create_time() - self.started_at) < 1.0
        return False


def register(url: str, config: Path, folder: Path, drain_s: float, models: tuple[str, ...]) -> None:
    """Register this process's application."""
    me = psutil.Process()
    instance = Instance(
        pid=me.pid,
        started_at=me.create_time(),
        url=url,
        config=str(config.resolve()),
        folder=str(folder),
        drain_s=drain_s,
        models=models,
    )
    write_instance(instance)


def write_instance(instance: Instance) -> None:
    """Register an application, or changed values of it."""
    file = _file(Path(instance.folder))
    draft = file.with_suffix(".new")
    draft.write_bytes(msgspec.json.encode(instance))
    draft.replace(file)


def read_instance(folder: Path) -> Instance:
    """Return the application that is registered in a folder.

    Raises:
        OSError: there is none.
    """
    return msgspec.json.decode(_file(folder).read_bytes(), type=Instance)


def unregister(folder: Path) -> None:
    """Unregister an application that has ended."""
    _file(folder).unlink(missing_ok=True)


def running_instances() -> Iterator[Instance]:
    """Yield the running applications of this user on this machine."""
    for file in sorted(instances_folder().glob("*/instance.json")):
        with contextlib.suppress(OSError, msgspec.MsgspecError):
            instance = read_instance(file.parent)
            if instance.is_running():
                yield instance


def instance_at(url: str, running: Iterable[Instance]) -> Instance | None:
    """Return the application at an address, in any notation; None if there is none."""
    named = url.rstrip("/").removesuffix("/v1").replace("//localhost", "//127.0.0.1")
    return next((each for each in running if each.url.rstrip("/") == named), None)


def choose_instance(running: Sequence[Instance], url: str | None) -> Instance:
    """Return the application at an address; the only one for None.

    Raises:
        ServeAppError: none runs, or the choice is ambiguous.
    """
    urls = ", ".join(each.url for each in running)
    if not running:
        raise ServeAppError("no application of this user runs on this machine")
    if url is None:
        if len(running) > 1:
            raise ServeAppError(f"several applications run here, choose one with --url: {urls}")
        return running[0]
    if found := instance_at(url, running):
        return found
    raise ServeAppError(f"no application of this user runs at {url}; running: {urls}")


def _file(folder: Path) -> Path:
    return folder / "instance.json"
