"""Listening sockets: on any free port, on the first free one of a range, or on a shared one."""

import contextlib
import ctypes
import errno
import ipaddress
import socket
import struct
from typing import Any

from serve_app.errors import ServeAppError

# Linux' SO_ATTACH_FILTER, which Python does not define; its argument is a Berkeley Packet Filter program.
_ATTACH_FILTER = 26


class PortError(ServeAppError):
    """No port is available on an address; the message has both and the remedy."""


def listening_socket(host: str, port: int, ports: int, backlog: int) -> socket.socket:
    """Listen on an address, and return the socket.

    Args:
        host: an address, not a name.
        port: first port of the range; 0 for any free port.
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
        f"cannot listen on {host}: ports {candidates.start} to {candidates.stop - 1} are in use; set more "
        "ports, or port 0 for any free one"
    )


def shared_socket(host: str, port: int, backlog: int) -> socket.socket:
    """Listen on a port that this user's processes may share, and return the socket.

    The kernel assigns each new connection to one of the listeners. A process and its successor can thus
    listen at the same time, without refused connections in between.

    Args:
        host: an address, or a name of one.

    Raises:
        PortError: the address is not this machine's, or a process that does not share has the port.
    """
    try:
        ((family, _, _, _, address), *_) = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        return _open(family, address, backlog, shared=True)
    except OSError as exc:
        raise PortError(f"cannot listen on {host}:{port}: {exc}") from exc


def drop_new_connections(sock: socket.socket) -> bool:
    """Make the kernel drop connection attempts to a shared socket; return whether it does.

    Called before the socket is closed. Handshakes in progress are still accepted. A dropped client retries
    after a second, and reaches another listener. Without this, the connections in the backlog would be reset.
    """
    # Load the TCP flags, test SYN; return length 0 (drop) if it is set, and the whole segment otherwise.
    program = [(0x30, 0, 0, 13), (0x45, 0, 1, 0x02), (0x06, 0, 0, 0), (0x06, 0, 0, 0xFFFF_FFFF)]
    code = b"".join(struct.pack("HBBI", *each) for each in program)
    buffer = ctypes.create_string_buffer(code, len(code))
    try:
        sock.setsockopt(
            socket.SOL_SOCKET, _ATTACH_FILTER, struct.pack("HL", len(program), ctypes.addressof(buffer))
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
        # Inherited by accepted connections: the kernel must not delay a first token to fill a packet.
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.bind(address)
        # Listen at once, because until then another process may bind the same port, and fail later.
        sock.listen(backlog)
        sock.setblocking(False)
        closing.pop_all()
    return sock
