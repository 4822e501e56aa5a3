"""Sockets that listen: on any free port, or on the first free one of a range that a firewall lets through."""

import contextlib
import errno
import ipaddress
import socket

from serve_app.errors import ServeAppError


class PortError(ServeAppError):
    """No port can be had on an address; the message names both and the remedy."""


def listening_socket(host: str, port: int, ports: int, backlog: int) -> socket.socket:
    """Listen, and return the socket.

    Args:
        host: the address, not a name.
        port: the first of the range; 0 for any free port.
        ports: size of the range.

    Raises:
        PortError: the address is not this machine's, or all ports are taken.
    """
    candidates = range(port, port + ports) if port else range(1)
    for candidate in candidates:
        try:
            return _listening(host, candidate, backlog)
        except OSError as exc:
            if exc.errno != errno.EADDRINUSE:
                raise PortError(f"cannot listen on {host}:{candidate}: {exc}") from exc
    raise PortError(
        f"cannot listen on {host}: the ports {candidates.start} to {candidates.stop - 1} are taken; set more "
        "of them, or port 0 for any free one"
    )


def _listening(host: str, port: int, backlog: int) -> socket.socket:
    family = socket.AF_INET6 if ipaddress.ip_address(host).version == 6 else socket.AF_INET
    sock = socket.socket(family, socket.SOCK_STREAM)
    with contextlib.ExitStack() as closing:
        closing.callback(sock.close)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        # Accepted connections inherit it: the kernel must not delay a first token to fill a packet.
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.bind((host, port))
        # At once: until then another process may bind the same port, and fail later.
        sock.listen(backlog)
        sock.setblocking(False)
        closing.pop_all()
    return sock
