"""Scheduler's port under load: unauthenticated crowds must stay cheap, and real peers must connect."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from dataclasses import replace

import pytest
import pytest_asyncio
import uvloop

from serve_app.serving.channel.link import HEADER_BYTES
from serve_app.serving.channel.messages import SnapshotEnd, Welcome
from tests.serving.channel.harness import (
    FAST,
    PATIENCE_S,
    ControlPlane,
    RawPeer,
    hello,
    scheduler_settings,
    socket_descriptors,
    wait_until,
)

LIMIT = 16
CROWD = 4 * LIMIT


# Ray runs actors on uvloop if it is installed.
LOOP_FACTORIES = {"asyncio": asyncio.new_event_loop, "uvloop": uvloop.new_event_loop}


@pytest_asyncio.fixture
async def control_plane() -> AsyncIterator[ControlPlane]:
    """Yield a scheduler that accepts 16 connections without a handshake."""
    control_plane = ControlPlane(scheduler_settings(), replace(FAST, max_pending_handshakes=LIMIT))
    await control_plane.begin()
    yield control_plane
    await control_plane.close()


@pytest.fixture
def faults() -> list[str]:
    """Errors that the event loop reports for callbacks, after a call of `watch`."""
    return []


def watch(faults: list[str]) -> None:
    loop = asyncio.get_running_loop()
    loop.set_exception_handler(lambda _loop, context: faults.append(repr(context.get("exception"))))


def open_sockets() -> int:
    return len(socket_descriptors())


async def test_unauthenticated_idle_connections_leave_no_descriptor(
    control_plane: ControlPlane, faults: list[str]
) -> None:
    watch(faults)
    before = open_sockets()
    # All in one turn of the loop, so that they are accepted together.
    crowd = await asyncio.gather(*(RawPeer.at(control_plane.endpoint()) for _ in range(CROWD)))
    # The crowd keeps its own ends open; the scheduler's ends must all close. There are fewer if a connection
    # of an earlier test was still open when they were counted.
    await wait_until(lambda: open_sockets() <= before + CROWD, "the scheduler has closed every one of them")
    for raw_peer in crowd:
        assert await raw_peer.closed()
        raw_peer.leave()
    assert not faults


async def test_an_unauthenticated_connection_with_half_a_message_is_closed_in_time(
    control_plane: ControlPlane,
) -> None:
    raw_peer = await RawPeer.at(control_plane.endpoint())
    raw_peer.send_bytes(b"\x00" * (HEADER_BYTES - 1))
    assert await raw_peer.closed()


async def test_a_flood_of_real_peers_is_accepted_and_nothing_raises(
    control_plane: ControlPlane, faults: list[str]
) -> None:
    watch(faults)
    before = open_sockets()

    async def join(number: int) -> RawPeer:
        raw_peer = await RawPeer.at(control_plane.endpoint())
        raw_peer.send(hello(control_plane.endpoint(), peer_id=f"g{number}"), SnapshotEnd())
        await raw_peer.receive(Welcome)
        return raw_peer

    async with asyncio.timeout(PATIENCE_S):
        peers = await asyncio.gather(*(join(number) for number in range(CROWD)))
    assert not faults
    for peer in peers:
        peer.leave()
    await wait_until(lambda: control_plane.live.status()["gateways"] == 0)
    await wait_until(lambda: open_sockets() <= before, "their descriptors are free")


async def test_a_peer_connects_despite_continuous_unauthenticated_connections(
    control_plane: ControlPlane,
) -> None:
    ended, endpoint = asyncio.Event(), control_plane.endpoint()

    async def connect_repeatedly() -> None:
        while not ended.is_set():
            with contextlib.suppress(ConnectionError):
                pest = await RawPeer.at(endpoint)
                await pest.closed()
                pest.leave()

    # They reconnect at once when they are closed, and outnumber the places.
    before = open_sockets()
    pests = [asyncio.create_task(connect_repeatedly()) for _ in range(2 * LIMIT)]
    await wait_until(lambda: open_sockets() == before + 3 * LIMIT, "the connections take every slot")
    assert (await control_plane.gateway()).is_connected
    ended.set()
    await asyncio.wait(pests)


async def test_never_more_wait_for_their_introduction_than_may(control_plane: ControlPlane) -> None:
    before = open_sockets()
    crowd = [await RawPeer.at(control_plane.endpoint()) for _ in range(CROWD)]
    most = 0

    async def count_sockets() -> None:
        nonlocal most
        while True:
            most = max(most, open_sockets() - before - CROWD)
            await asyncio.sleep(0)

    looking = asyncio.create_task(count_sockets())
    for raw_peer in crowd:
        assert await raw_peer.closed()
    looking.cancel()
    for raw_peer in crowd:
        raw_peer.leave()
    # uvloop closes a descriptor at the end of a turn, in which it may have accepted another connection.
    assert LIMIT <= most <= LIMIT + 1


async def test_a_scheduler_that_stops_closes_connections_in_their_handshake(
    control_plane: ControlPlane,
) -> None:
    before = open_sockets()
    crowd = [await RawPeer.at(control_plane.endpoint()) for _ in range(LIMIT // 2)]
    control_plane.kill()
    for raw_peer in crowd:
        assert await raw_peer.closed()
        raw_peer.leave()
    # The listening port is closed, too.
    await wait_until(lambda: open_sockets() == before - 1, "nothing is left open")
