"""Listening sockets: on any free port, on the first free one of a range, or one for a node's gateways."""

import asyncio
import contextlib
import errno
import ipaddress
import logging
import mmap
import os
import socket
import subprocess
import sys
import time
from typing import Any

from serve_app.errors import ServeAppError
from serve_app.serving import socket_holder
from serve_app.serving.socket_holder import (
    ACCEPTED,
    CLOSE,
    COUNT_BYTES,
    MESSAGE_BYTES,
    PLACES,
    peer_uid,
)

logger = logging.getLogger("ray.serve")

# Names of UNIX sockets are limited.
_MAX_NAME = 100
# A holder that another gateway starts listens within milliseconds.
_ATTEMPTS, _RETRY_S = 50, 0.02
_HOLDER_TIMEOUT_S = 5.0


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


class HeldSocket:
    """The listening socket of a node's gateways, which a `socket_holder` keeps open after they have ended.

    Args:
        host: an address, or a name of one.
        cluster: address of the Ray cluster; gateways of another one do not share the socket.
    """

    def __init__(self, host: str, port: int, backlog: int, cluster: str) -> None:
        self._address = host, port, backlog
        # In the namespace of the node's network, like the port.
        self._name = f"\0ewsjf-listener-{os.getuid()}-{port}-{host}"[:_MAX_NAME]
        self._cluster = (cluster or "this machine").encode()[:MESSAGE_BYTES]
        self._sock: socket.socket | None = None
        self._lease: socket.socket | None = None
        # Connections of each gateway of the node, and the place of this one.
        self._counts: memoryview | None = None
        self._place = 0
        self._renewal: asyncio.Task[socket.socket] | None = None

    def __repr__(self) -> str:
        return f"HeldSocket({self._address[0]}:{self._address[1]}, held={self._lease is not None})"

    async def open(self) -> socket.socket:
        """Return the socket of the node's holder; start a holder if there is none.

        Without a holder, for example on another system than Linux, the socket ends with its gateways.

        Raises:
            PortError: the address is not this machine's, or others have the port.
        """
        try:
            await asyncio.to_thread(self._attach)
        except (OSError, PortError, subprocess.SubprocessError) as error:
            if isinstance(error, PortError) and self._sock is None:
                raise
            logger.warning("event=no_socket_holder reason=%r", str(error))
        if self._lease is not None:
            asyncio.get_running_loop().add_reader(self._lease, self._on_holder_end)
        self._sock = self._sock or _shared_socket(*self._address)
        return self._sock

    def has_turn(self, connections: int) -> bool:
        """Publish the number of this process' connections; return whether no other one has fewer."""
        if self._counts is None:
            return True
        self._counts[self._place] = connections
        return connections <= min(self._counts)

    def leave(self, *, closes: bool = False) -> None:
        """Leave the socket to other gateways. `closes`: no other one follows, so refuse connections."""
        if self._lease is not None:
            asyncio.get_running_loop().remove_reader(self._lease)
            if closes:
                with contextlib.suppress(OSError):
                    self._lease.send(CLOSE)
            self._lease.close()
            self._lease = None

    def _on_holder_end(self) -> None:
        self.leave()
        self._renewal = asyncio.get_running_loop().create_task(self.open())

    def _attach(self) -> None:
        """Connect to the holder, or start one.

        Raises:
            OSError, subprocess.SubprocessError: no holder could be started.
            PortError: see `open`.
        """
        for _ in range(_ATTEMPTS):
            if self._connect():
                return
            with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as name:
                try:
                    # Only one process gets the name, and opens the port.
                    name.bind(self._name)
                except OSError as error:
                    if error.errno != errno.EADDRINUSE:
                        raise
                    time.sleep(_RETRY_S)
                    continue
                name.listen()
                self._sock = self._sock or _shared_socket(*self._address)
                _start_holder(name, self._sock)
        raise OSError("it does not respond")

    def _connect(self) -> bool:
        with contextlib.ExitStack() as closing:
            lease = closing.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET))
            lease.settimeout(_HOLDER_TIMEOUT_S)
            try:
                lease.connect(self._name)
                is_own = peer_uid(lease) == os.getuid()
                lease.send(self._cluster)
                message, received, _, _ = socket.recv_fds(lease, MESSAGE_BYTES, 2)
            except OSError:
                return False
            if not is_own or not message.startswith(ACCEPTED):
                raise PortError(
                    f"cannot listen on {self._address[0]}:{self._address[1]}: gateways of "
                    f"{f'the Ray cluster {message.decode()}' if is_own and message else 'another user'} have "
                    "the port; stop them, or choose another http_options.port"
                )
            held = socket.socket(fileno=received[0])
            with os.fdopen(received[1], "rb") as counts:
                self._counts = memoryview(mmap.mmap(counts.fileno(), PLACES * COUNT_BYTES)).cast("I")
            self._place = int(message.removeprefix(ACCEPTED))
            if self._sock is None:
                self._sock = held
            else:
                held.close()
            self._lease = lease
            closing.pop_all()
            return True


def _start_holder(name: socket.socket, sock: socket.socket) -> None:
    descriptors = name.fileno(), sock.fileno()
    command = [sys.executable, "-I", "-S", socket_holder.__file__, *map(str, descriptors)]
    # It continues in the background, outside this process' group and session.
    subprocess.run(  # noqa: S603
        command,
        check=True,
        cwd="/",
        pass_fds=descriptors,
        start_new_session=True,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )


def _shared_socket(host: str, port: int, backlog: int) -> socket.socket:
    try:
        ((family, _, _, _, address), *_) = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        # Shared, because gateways of 0.4.0 have the port until they are replaced.
        return _open(family, address, backlog, shared=True)
    except OSError as exc:
        raise PortError(f"cannot listen on {host}:{port}: {exc}") from exc


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
