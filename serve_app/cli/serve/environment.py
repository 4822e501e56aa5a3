"""The environment that the processes of Ray inherit, and the folder of an instance."""

import os
import shlex
import socket
import tempfile
from collections.abc import Mapping
from pathlib import Path

_SETTINGS = Path(__file__).with_name("serve.env")


def instance_folder(port: int) -> Path:
    """Where an instance on this port keeps its files. Short: Ray's sockets allow 107 bytes for a path."""
    return Path(tempfile.gettempdir()) / f"ewsjf-{os.getuid()}" / str(port)


def default_settings() -> dict[str, str]:
    """The settings of Ray Serve that this application is meant to run with, read as a shell reads them."""
    words = shlex.split(_SETTINGS.read_text(encoding="utf-8"), comments=True)
    return dict(word.split("=", 1) for word in words)


def environment(given: Mapping[str, str]) -> dict[str, str]:
    """Return the environment of the host and its processes; `given` takes precedence over defaults."""
    inherited = dict(given)
    # A dozen processes import the same thousand modules: they are compiled once, whatever a container's
    # image says.
    inherited.pop("PYTHONDONTWRITEBYTECODE", None)
    return default_settings() | inherited


def is_free(port: int) -> bool:
    """Whether nobody listens on a port of this machine."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("", port))
            probe.listen(1)
        except OSError:
            return False
    return True
