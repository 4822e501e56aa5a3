"""Who reaches an application, and how many: local addresses, open files, the admin key of who started it.

Keys in a configuration are for clients. Whoever started an application on this machine may look into it in
any case, and nobody else may for want of keys. So `serve` makes a secret for each start. Its processes find
it in their environment, and other commands of the same user in a file that only this user can read.
"""

import contextlib
import ipaddress
import os
import resource
import secrets
from collections.abc import Mapping
from pathlib import Path

ADMIN_KEY_VARIABLE = "EWSJF_ADMIN_KEY"
"""Environment variable of gateways that holds it; to be set where something else than `serve` starts Ray."""
ADMIN_KEY_FILE = "admin-key"
"""In the folder of an application; only the user who started it can read it."""


# Descriptors: most requests of a gateway wait, and have no connection to an engine.
_PER_CONNECTION = 1.5
_MAX_CONNECTIONS = 20_000


def is_loopback(host: str) -> bool:
    """Whether only programs of the same machine reach what listens on this address."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


def admin_key_of(environment: Mapping[str, str]) -> str:
    """The admin key that the environment gives; empty when it gives none."""
    return environment.get(ADMIN_KEY_VARIABLE, "").strip()


def written_admin_key(folder: Path, environment: Mapping[str, str] = os.environ) -> str:
    """The key of an application that is to start, written into its folder."""
    key = admin_key_of(environment) or secrets.token_urlsafe(32)
    descriptor = os.open(folder / ADMIN_KEY_FILE, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with os.fdopen(descriptor, "w", encoding="utf-8") as file:
        file.write(key)
    return key


def read_admin_key(folder: Path) -> str | None:
    """The key that lies in the folder of an application; None when this user cannot read one there."""
    with contextlib.suppress(OSError):
        return (folder / ADMIN_KEY_FILE).read_text(encoding="utf-8").strip() or None
    return None


def most_connections() -> int:
    """Return how many connections of clients a process may have, by its limit of open files."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard == resource.RLIM_INFINITY:
        return _MAX_CONNECTIONS
    return min(int(hard / _PER_CONNECTION), _MAX_CONNECTIONS)


def raise_descriptor_limit() -> None:
    """As many open files as the system allows: a waiting request holds a connection."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
