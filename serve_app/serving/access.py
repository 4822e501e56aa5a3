"""Access to an application: local addresses, connection limits, and the admin key of the user who started it.

Keys in a configuration are for clients. The user who started an application may always inspect it, and others
must not be able to just because no keys are configured. So `serve` generates a secret at each start. Its
processes find it in their environment, and other commands of the user read it from a file with mode 0600.
"""

import contextlib
import ipaddress
import os
import resource
import secrets
from collections.abc import Mapping
from pathlib import Path

ADMIN_KEY_VARIABLE = "EWSJF_ADMIN_KEY"
"""Environment variable of gateways with the admin key; set it if Ray is not started by `serve`."""
ADMIN_KEY_FILE = "admin-key"
"""File in an application's folder, readable only by the user who started it."""
RAY_TOKEN_VARIABLE = "RAY_AUTH_TOKEN_PATH"  # noqa: S105 - a name
"""Environment variable of Ray with the file of a cluster's token."""
_RAY_TOKEN_FILE = "ray-token"  # noqa: S105 - a name


# File descriptors per client connection; most requests wait, without a connection to an engine.
_PER_CONNECTION = 1.5
_MAX_CONNECTIONS = 20_000


def is_loopback(host: str) -> bool:
    """Return whether an address is reachable from this machine only."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


def admin_key_of(environment: Mapping[str, str]) -> str:
    """Return the admin key from the environment; empty if it is not set."""
    return environment.get(ADMIN_KEY_VARIABLE, "").strip()


def write_admin_key(folder: Path, environment: Mapping[str, str] = os.environ) -> str:
    """Write the admin key of a starting application into its folder, and return it."""
    key = admin_key_of(environment) or secrets.token_urlsafe(32)
    _write_private(folder / ADMIN_KEY_FILE, key)
    return key


def write_ray_token(folder: Path, environment: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Write the token of a new Ray cluster into its folder, and return the variables that name it.

    Ray's default is the home folder, which may be read-only. The user's own token has precedence.
    """
    if any(environment.get(name) for name in ("RAY_AUTH_TOKEN", RAY_TOKEN_VARIABLE)):
        return {}
    _write_private(folder / _RAY_TOKEN_FILE, secrets.token_hex(32))
    return ray_token(folder)


def ray_token(folder: Path) -> dict[str, str]:
    """Return the variables that `write_ray_token` returned for a folder; empty without a token there."""
    path = folder / _RAY_TOKEN_FILE
    return {RAY_TOKEN_VARIABLE: str(path)} if path.is_file() else {}


def _write_private(path: Path, text: str) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with os.fdopen(descriptor, "w", encoding="utf-8") as file:
        file.write(text)


def read_admin_key(folder: Path) -> str | None:
    """Return the admin key in an application's folder; None if this user cannot read one."""
    with contextlib.suppress(OSError):
        return (folder / ADMIN_KEY_FILE).read_text(encoding="utf-8").strip() or None
    return None


def max_connections() -> int:
    """Return the maximum number of client connections of a process, from its limit of open files."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        return _MAX_CONNECTIONS
    return min(int(soft / _PER_CONNECTION), _MAX_CONNECTIONS)


def raise_descriptor_limit() -> None:
    """Raise the limit of open files to the maximum, because each waiting request holds a connection."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
