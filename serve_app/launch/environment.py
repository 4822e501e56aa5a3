"""What the processes of Ray inherit: Serve's settings, folders and ports of this instance, open files."""

import os
import shlex
import socket
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path

from serve_app.access import most_connections

_SETTINGS = Path(__file__).with_name("serve.env")

# Ports of gateways, each with its own range, so that several instances of one machine do not meet.
_GATEWAY_PORTS = range(20_000, 30_000, 200)


def instance_folder(port: int) -> Path:
    """Where an instance on this port keeps its files. Short: Ray's sockets allow 107 bytes for a path."""
    return Path(tempfile.gettempdir()) / f"ewsjf-{os.getuid()}" / str(port)


# Of HTTP; the other ports of an application move with it.
_USUAL_PORT = 8000
# Less than the distance of any two of the usual ports.
_PORTS_APART = 90


def default_settings() -> dict[str, str]:
    """The settings of Ray Serve that this application is meant to run with, read as a shell reads them."""
    words = shlex.split(_SETTINGS.read_text(encoding="utf-8"), comments=True)
    return dict(word.split("=", 1) for word in words)


def environment(
    given: Mapping[str, str], folder: Path, port: int, *, has_front_end: bool = True
) -> dict[str, str]:
    """The environment of the host and of all that it starts; what is `given` counts more than our defaults.

    Args:
        folder: of this instance.
        port: on which it listens; no other port is chosen twice.
        has_front_end: whether HAProxy takes its requests. Without, a gateway that is to stop need not wait
            until that has heard of it.
    """
    # Short: HAProxy takes 97 bytes for the path of a socket, and Serve puts the node's id of 56 into it.
    haproxy = folder / "h"
    ports = {
        "RAY_SERVE_HAPROXY_METRICS_PORT": 9101,
        "RAY_SERVE_HAPROXY_STATS_PORT": 8404,
        "RAY_SERVE_FALLBACK_PROXY_HTTP_PORT": 8500,
        "RAY_SERVE_FALLBACK_PROXY_GRPC_PORT": 9500,
    }
    # Two that start in the same moment see the same free ports, so they begin to look at different ones.
    apart = (port - _USUAL_PORT) % _PORTS_APART
    wanted = [usual + apart for name, usual in ports.items() if name not in given]
    free = _free_ports(wanted, taken={port})
    chosen = {name: str(next(free)) for name in ports if name not in given}
    gateways = _gateway_ports(port)
    defaults = {
        **default_settings(),
        "RAY_SERVE_HAPROXY_CONFIG_FILE_LOC": f"{haproxy}/haproxy.cfg",
        "RAY_SERVE_HAPROXY_SOCKET_PATH": f"{haproxy}/admin.sock",
        "RAY_SERVE_HAPROXY_SERVER_STATE_BASE": str(haproxy),
        "RAY_SERVE_HAPROXY_SERVER_STATE_FILE": f"{haproxy}/server-state",
        "RAY_SERVE_HAPROXY_METRICS_SOCKET_PATH": f"{haproxy}/metrics",
        # Serve's own 4,096 are below what the schedulers' queues hold.
        "RAY_SERVE_HAPROXY_MAXCONN": str(most_connections(proxied=True)),
        "RAY_SERVE_DIRECT_INGRESS_MIN_HTTP_PORT": str(gateways.start),
        "RAY_SERVE_DIRECT_INGRESS_MAX_HTTP_PORT": str(gateways.stop - 1),
        **chosen,
        **({} if has_front_end else {"RAY_SERVE_DIRECT_INGRESS_MIN_DRAINING_PERIOD_S": "0"}),
    }
    inherited = dict(given)
    # A dozen processes import the same thousand modules: they are compiled once, whatever a container's
    # image says.
    inherited.pop("PYTHONDONTWRITEBYTECODE", None)
    return defaults | inherited


def _free_ports(wanted: list[int], taken: set[int]) -> Iterator[int]:
    """For each wanted port itself, or the next free one above it."""
    for first in wanted:
        port = first
        while port in taken or not is_free(port):
            port += 1
        taken.add(port)
        yield port


def _gateway_ports(port: int) -> range:
    """A range for the gateways; two instances begin to look for one in different places."""
    places = len(_GATEWAY_PORTS)
    for offset in range(places):
        first = _GATEWAY_PORTS[(port + offset) % places]
        if all(is_free(each) for each in range(first, first + 4)):
            break
    return range(first, first + _GATEWAY_PORTS.step)


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
