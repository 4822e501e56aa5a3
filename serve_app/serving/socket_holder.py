"""Holder of a listening socket: a small process that outlives the gateways which accept from it.

    python -I -S socket_holder.py NAME_FD SOCKET_FD

Gateways of a node accept connections from one socket. The holder keeps it open while there is none, so that
connection attempts wait in the kernel for the next gateway (as with socket activation). `listening` starts
the holder, and has the other side of the protocol: on a connection to the UNIX socket NAME_FD, a gateway
sends the name of its cluster. It receives `ACCEPTED`, a number, SOCKET_FD and shared memory, or the name of
the cluster whose gateways have the socket. A gateway is counted until its connection ends. Without any for
`ALONE_S`, or after the last has sent `CLOSE`, the holder exits, and the kernel refuses connections again.

In the shared memory each gateway writes its number of connections, at the place of its number, so that the
one with the fewest accepts the next one. Places without a gateway have the largest number.

Runs as a script with the standard library only, because it must start in milliseconds and use little memory.
"""

import contextlib
import os
import selectors
import socket
import struct
import sys
import time

ACCEPTED = b"accepted "
CLOSE = b"close"
ALONE_S = 30.0
MESSAGE_BYTES = 512
PLACES = 64
COUNT_BYTES = 4
_NO_GATEWAY = b"\xff" * COUNT_BYTES


def peer_uid(sock: socket.socket) -> int:
    """Return the user id of the process at the other end of a UNIX socket."""
    size = struct.calcsize("3i")
    _pid, uid, _gid = struct.unpack("3i", sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, size))
    return int(uid)


class SocketHolder:
    """Holds `sock` for the gateways that connect to `name`."""

    def __init__(self, name: socket.socket, sock: socket.socket) -> None:
        self._sock = sock
        self._cluster = b""
        # The place of each gateway.
        self._attached: dict[socket.socket, int] = {}
        self._counts = os.memfd_create("connections")
        os.pwrite(self._counts, _NO_GATEWAY * PLACES, 0)
        self._alone_since = time.monotonic()
        self._closes = False
        self._ready = selectors.DefaultSelector()
        self._ready.register(name, selectors.EVENT_READ, self._accept)

    def run(self) -> None:
        """Hold the socket until no gateway needs it."""
        while self._attached or not self._closes:
            left_s = None if self._attached else self._alone_since + ALONE_S - time.monotonic()
            if left_s is not None and left_s <= 0:
                return
            for key, _ in self._ready.select(left_s):
                key.data(key.fileobj)

    def _accept(self, name: socket.socket) -> None:
        gateway, _ = name.accept()
        if peer_uid(gateway) == os.getuid():
            self._ready.register(gateway, selectors.EVENT_READ, self._read)
        else:
            gateway.close()

    def _read(self, gateway: socket.socket) -> None:
        try:
            message = gateway.recv(MESSAGE_BYTES)
        except OSError:
            message = b""
        if not message:
            self._detach(gateway)
        elif message == CLOSE:
            self._closes = True
        elif self._attached and message != self._cluster:
            with contextlib.suppress(OSError):
                gateway.send(self._cluster)
        else:
            self._attach(gateway, message)

    def _attach(self, gateway: socket.socket, cluster: bytes) -> None:
        self._cluster, self._closes = cluster, False
        # More gateways than places share the last one.
        free = set(range(PLACES)).difference(self._attached.values())
        place = self._attached[gateway] = min(free, default=PLACES - 1)
        with contextlib.suppress(OSError):
            socket.send_fds(gateway, [ACCEPTED + str(place).encode()], [self._sock.fileno(), self._counts])

    def _detach(self, gateway: socket.socket) -> None:
        self._ready.unregister(gateway)
        gateway.close()
        place = self._attached.pop(gateway, None)
        if place is not None:
            os.pwrite(self._counts, _NO_GATEWAY, place * COUNT_BYTES)
            self._alone_since = time.monotonic()


def main() -> None:
    """Run in the background, under a name that listings of processes show."""
    if os.fork():
        os._exit(0)
    with contextlib.suppress(OSError), open("/proc/self/comm", "w", encoding="utf-8") as comm:  # noqa: PTH123
        comm.write("ewsjf-listener")
    name, sock = (socket.socket(fileno=int(each)) for each in sys.argv[1:3])
    SocketHolder(name, sock).run()


if __name__ == "__main__":
    main()
