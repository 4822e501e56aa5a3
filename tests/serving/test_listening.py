import contextlib
import socket
from collections.abc import Iterator

import pytest

from serve_app.serving.listening import PortError, listening_socket

HOST = "127.0.0.1"


@pytest.fixture
def three_ports() -> Iterator[int]:
    """Yield the first of three consecutive free ports."""
    for _ in range(100):
        with contextlib.ExitStack() as held:
            first = held.enter_context(socket.create_server((HOST, 0))).getsockname()[1]
            try:
                for port in (first + 1, first + 2):
                    held.enter_context(socket.create_server((HOST, port)))
            except (OSError, OverflowError):
                continue
        yield first
        return
    pytest.fail("no three free ports in a row")


def test_each_takes_the_first_free_port_of_the_range_until_there_is_none(three_ports: int) -> None:
    with contextlib.ExitStack() as opened:
        found = [
            opened.enter_context(listening_socket(HOST, three_ports, 3, 8)).getsockname()[1] for _ in range(3)
        ]
        assert found == [three_ports, three_ports + 1, three_ports + 2]
        with pytest.raises(PortError, match=f"ports {three_ports} to {three_ports + 2} are in use"):
            listening_socket(HOST, three_ports, 3, 8)
    with listening_socket(HOST, three_ports, 3, 8) as sock:
        assert sock.getsockname()[1] == three_ports


def test_port_0_is_any_free_port() -> None:
    with listening_socket(HOST, 0, 1, 8) as first, listening_socket(HOST, 0, 1, 8) as second:
        assert first.getsockname()[1] != second.getsockname()[1]


def test_an_address_of_another_machine_is_reported() -> None:
    with pytest.raises(PortError, match=r"cannot listen on 192\.0\.2\.1:0"):
        listening_socket("192.0.2.1", 0, 1, 8)
