"""What the kernel knows of a peer that says nothing: whether its host still acknowledges what it is sent."""

import asyncio
import socket
import struct

# `tcpi_last_ack_recv` of Linux' `struct tcp_info`: milliseconds since the last acknowledgement.
_LAST_ACKNOWLEDGEMENT = struct.Struct("@56xI")


def acknowledged_ago_s(transport: asyncio.BaseTransport) -> float | None:
    """Seconds since the peer's host acknowledged something; None where the system does not tell."""
    sock = transport.get_extra_info("socket")
    if sock is None or not hasattr(socket, "TCP_INFO"):
        return None
    try:
        info = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _LAST_ACKNOWLEDGEMENT.size)
        (milliseconds,) = _LAST_ACKNOWLEDGEMENT.unpack(info)
    except (OSError, struct.error):
        return None
    return float(milliseconds) / 1000
