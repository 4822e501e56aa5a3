"""Sockets that listen: on any free port, on the first free one of a range, or on one that others share."""

import contextlib
import ctypes
import errno
import ipaddress
import socket
import struct
from typing import Any

from serve_app.errors import ServeAppError

# As Linux numbers it; Python has no name for it. It takes a program of the Berkeley Packet Filter.
_ATTACH_FILTER = 26


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


def shared_socket(host: str, port: int, backlog: int) -> socket.socket:
    """Listen on a port that others of this user may share, and return the socket.

    The kernel gives each new connection to one of those that listen. So a process and its successor may
    listen at the same time, and nobody is refused in between.

    Args:
        host: an address, or a name of one.

    Raises:
        PortError: the address is not this machine's, or somebody who does not share has the port.
    """
    try:
        ((family, _, _, _, address), *_) = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        return _open(family, address, backlog, shared=True)
    except OSError as exc:
        raise PortError(f"cannot listen on {host}:{port}: {exc}") from exc


def take_no_new_connections(sock: socket.socket) -> bool:
    """Let the kernel drop each attempt to connect to a shared socket, before it is closed; whether it does.

    What is half-way is still accepted. The kernel of a client that is dropped tries again after a second, and
    then meets another one that listens. Without this, whatever waits to be accepted at the close is reset.
    """
    # Of a segment: its flags, the bit SYN; a segment of no bytes is none.
    program = [(0x30, 0, 0, 13), (0x45, 0, 1, 0x02), (0x06, 0, 0, 0), (0x06, 0, 0, 0xFFFF_FFFF)]
    code = b"".join(struct.pack("HBBI", *each) for each in program)
    kept = ctypes.create_string_buffer(code, len(code))
    try:
        sock.setsockopt(
            socket.SOL_SOCKET, _ATTACH_FILTER, struct.pack("HL", len(program), ctypes.addressof(kept))
        )
    except OSError:
        return False
    return True


def _listening(host: str, port: int, backlog: int) -> socket.socket:
    family = socket.AF_INET6 if ipaddress.ip_address(host).version == 6 else socket.AF_INET
    return _open(family, (host, port), backlog, shared=False)


def _open(family: int, address: Any, backlog: int, *, shared: bool) -> socket.socket:
    sock = socket.socket(family, socket.SOCK_STREAM)
    with contextlib.ExitStack() as closing:
        closing.callback(sock.close)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if shared:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        # Accepted connections inherit it: the kernel must not delay a first token to fill a packet.
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.bind(address)
        # At once: until then another process may bind the same port, and fail later.
        sock.listen(backlog)
        sock.setblocking(False)
        closing.pop_all()
    return sock
