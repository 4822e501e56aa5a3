import asyncio
import contextlib
import socket
import sys
import threading
import time
from collections.abc import AsyncIterator, Iterator

import psutil
import pytest

from experiments.common.application import free_port
from serve_app.serving import listening, socket_holder
from serve_app.serving.listening import HeldSocket, PortError, listening_socket
from serve_app.serving.socket_holder import SocketHolder

HOST = "127.0.0.1"
# Answers each connection with its process id.
ACCEPTING = f"""
import asyncio, os, sys
from serve_app.serving.listening import HeldSocket

async def answer(_, writer):
    writer.write(str(os.getpid()).encode())
    writer.close()

async def main():
    sock = await HeldSocket("{HOST}", int(sys.argv[1]), 64, "cluster").open()
    async with await asyncio.start_server(answer, sock=sock) as server:
        print(flush=True)
        await server.serve_forever()

asyncio.run(main())
"""


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


async def accepting(port: int) -> asyncio.subprocess.Process:
    """Start a process that accepts connections from the node's socket."""
    command = sys.executable, "-c", ACCEPTING, str(port)
    started = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE)
    assert started.stdout is not None
    await started.stdout.readline()
    return started


@contextlib.asynccontextmanager
async def held(port: int, cluster: str = "cluster") -> AsyncIterator[HeldSocket]:
    """Hold the socket from this process, and refuse connections in the end."""
    made = HeldSocket(HOST, port, 64, cluster)
    with await made.open():
        yield made
        made.leave(closes=True)


def holder(port: int) -> psutil.Process:
    """Wait for the process that holds the socket, and return it."""
    for _ in range(1_000):
        for process in psutil.process_iter(["name"]):
            if process.info["name"] == "ewsjf-listener" and any(
                each.laddr.port == port for each in process.net_connections("tcp")
            ):
                return process
        time.sleep(0.01)
    pytest.fail(f"no process holds port {port}")


async def is_refused(port: int, within_s: float = 5.0) -> bool:
    """Wait until the port refuses connections; return whether it does."""
    until = asyncio.get_running_loop().time() + within_s
    while asyncio.get_running_loop().time() < until:
        try:
            (await asyncio.open_connection(HOST, port))[1].close()
        except ConnectionRefusedError:
            return True
        except ConnectionResetError:
            # It was waiting to be accepted when the port was closed.
            continue
        await asyncio.sleep(0.01)
    return False


async def answers(port: int, connections: int) -> list[bytes]:
    async def one() -> bytes:
        reader, writer = await asyncio.open_connection(HOST, port)
        async with asyncio.timeout(20):
            answer = await reader.read()
        writer.close()
        return answer

    return await asyncio.gather(*(one() for _ in range(connections)))


async def test_connections_wait_for_the_successor_of_a_killed_process() -> None:
    port = free_port()
    killed = await accepting(port)
    assert await answers(port, 1) == [str(killed.pid).encode()]
    killed.kill()
    await killed.wait()
    asking = asyncio.create_task(answers(port, 20))
    await asyncio.sleep(0.1)
    assert not asking.done()
    successor = await accepting(port)
    assert await asking == [str(successor.pid).encode()] * 20
    successor.terminate()
    await successor.wait()
    holder(port).kill()


async def test_a_killed_holder_is_replaced_by_one_with_the_same_socket() -> None:
    port = free_port()
    async with held(port):
        killed = holder(port)
        killed.kill()
        killed.wait(10)
        assert (await asyncio.to_thread(holder, port)).pid != killed.pid
        successor = await accepting(port)
        assert await answers(port, 20) == [str(successor.pid).encode()] * 20
        successor.terminate()
        await successor.wait()
    assert await is_refused(port)


async def test_gateways_of_another_cluster_get_the_port_only_when_it_is_free() -> None:
    port = free_port()
    first = HeldSocket(HOST, port, 64, "10.0.0.1:6379")
    with await first.open():
        with pytest.raises(
            PortError, match=r"gateways of the Ray cluster 10\.0\.0\.1:6379 have the port; stop"
        ):
            await HeldSocket(HOST, port, 64, "10.0.0.2:6379").open()
        first.leave()
    async with held(port, "10.0.0.2:6379"):
        assert not await is_refused(port, within_s=0.2)
    assert await is_refused(port)


async def test_the_port_stays_open_while_one_gateway_of_several_stays() -> None:
    port = free_port()
    async with held(port):
        async with held(port):
            pass
        assert not await is_refused(port, within_s=0.2)


async def test_the_gateway_with_the_fewest_connections_has_the_turn() -> None:
    port = free_port()
    async with held(port) as one, held(port) as other:
        assert one.has_turn(0)
        assert other.has_turn(0)
        assert not one.has_turn(3)
        assert other.has_turn(2)
        assert other.has_turn(3)
        assert one.has_turn(3)
        assert not other.has_turn(4)
        # It takes the place of one that has left.
        one.leave()
        async with held(port) as third:
            assert third.has_turn(3)
            assert not third.has_turn(5)
        async with asyncio.timeout(10):
            while not other.has_turn(9):  # noqa: ASYNC110 - the holder sees the end a little later
                await asyncio.sleep(0.01)


async def test_the_port_closes_some_time_after_the_last_gateway(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket_holder, "ALONE_S", 0.2)
    with (
        socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as name,
        listening_socket(HOST, 0, 1, 8) as sock,
    ):
        name.bind("")
        name.listen()
        running = threading.Thread(target=SocketHolder(name, sock).run, daemon=True)
        running.start()
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as gateway:
            gateway.connect(name.getsockname())
            gateway.send(b"cluster")
            message, received, _, _ = socket.recv_fds(gateway, 64, 1)
            assert message == socket_holder.ACCEPTED + b"0"
            with socket.socket(fileno=received[0]) as same:
                assert same.getsockname() == sock.getsockname()
            running.join(0.5)
            assert running.is_alive()
        await asyncio.to_thread(running.join, 10.0)
        assert not running.is_alive()


async def test_a_socket_that_another_user_holds_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    port = free_port()
    async with held(port):
        monkeypatch.setattr(listening, "peer_uid", lambda _: -1)
        with pytest.raises(PortError, match="gateways of another user have the port"):
            await HeldSocket(HOST, port, 64, "cluster").open()


async def test_without_a_holder_the_port_is_open_all_the_same(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(sys, "executable", "/missing")
    port = free_port()
    with await HeldSocket(HOST, port, 64, "cluster").open():
        assert not await is_refused(port, within_s=0.2)
    assert "event=no_socket_holder" in caplog.text
    assert await is_refused(port)
