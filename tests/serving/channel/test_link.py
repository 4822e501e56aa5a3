import asyncio
import socket
from dataclasses import replace
from typing import Any

import pytest

from serve_app.core.events import Cancelled
from serve_app.serving.channel.link import Link, decode_from_peer
from serve_app.serving.channel.messages import Heartbeat
from serve_app.serving.channel.settings import ChannelSettings
from tests.serving.channel.harness import FAST, wait_until


class Owner:
    def __init__(self) -> None:
        self.received: list[Any] = []
        self.reasons: list[str] = []

    def on_link_message(self, _link: Link, message: Any) -> None:
        self.received.append(message)

    def on_link_lost(self, _link: Link, reason: str) -> None:
        self.reasons.append(reason)


class ExposedLink(Link):
    """Link that exposes its transport."""

    transport: asyncio.Transport

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport
        super().connection_made(transport)


class Pair:
    """Two connected links."""

    def __init__(self, near: ExposedLink, far: ExposedLink, owners: tuple[Owner, Owner]) -> None:
        self.near, self.far = near, far
        self.near_owner, self.far_owner = owners

    def tick(self) -> None:
        self.near.tick()
        self.far.tick()


async def pair(settings: ChannelSettings = FAST) -> Pair:
    loop = asyncio.get_running_loop()
    owners = Owner(), Owner()
    far = ExposedLink(owners[1], decode_from_peer, settings)
    server = await loop.create_server(lambda: far, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    near = ExposedLink(owners[0], decode_from_peer, settings)
    await loop.create_connection(lambda: near, "127.0.0.1", port)
    await wait_until(lambda: far.open)
    server.close()
    return Pair(near, far, owners)


async def test_messages_go_both_ways_in_order() -> None:
    both = await pair()
    for n in range(1000):
        both.near.send(Cancelled(str(n)))
        both.far.send(Cancelled(str(-n)))
    await wait_until(lambda: len(both.near_owner.received) == len(both.far_owner.received) == 1000)
    assert both.far_owner.received == [Cancelled(str(n)) for n in range(1000)]
    assert both.near_owner.received == [Cancelled(str(-n)) for n in range(1000)]


async def test_small_messages_are_not_held_back_by_the_kernel() -> None:
    both = await pair()
    for link in (both.near, both.far):
        sock = link.transport.get_extra_info("socket")
        assert sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY) != 0


async def test_a_receipt_acknowledges_all_messages_up_to_a_number() -> None:
    both = await pair()
    number = both.near.send(Cancelled("a"))
    await wait_until(lambda: both.far_owner.received == [Cancelled("a")])
    assert both.near.acknowledged < number
    both.far.tick()
    await wait_until(lambda: both.near.acknowledged == number)


async def test_two_that_talk_and_listen_live_through_many_ticks() -> None:
    both = await pair()
    for _ in range(30):
        both.tick()
        await asyncio.sleep(0.002)
    assert both.near.open
    assert both.far.open


async def test_a_loop_that_was_away_does_not_blame_its_peer() -> None:
    both = await pair()
    number = both.near.send(Cancelled("a"))
    await wait_until(lambda: both.far_owner.received == [Cancelled("a")])
    for _ in range(FAST.beats_to_death - 1):
        both.near.tick()
    both.far.tick()
    # However long the absence, there is one tick: the next one first reads what has arrived.
    await wait_until(lambda: both.near.acknowledged == number)
    both.near.tick()
    assert both.near.open


async def test_a_closed_link_sends_its_buffer_and_nothing_after() -> None:
    both = await pair()
    both.near.send(Cancelled("last words"))
    both.near.close("enough")
    assert both.near.send(Cancelled("more")) == 0
    await wait_until(lambda: bool(both.far_owner.reasons))
    assert both.far_owner.received == [Cancelled("last words")]
    assert both.near_owner.reasons == ["enough"]


async def test_a_peer_that_leaves_too_much_unread_is_cut_off() -> None:
    both = await pair(replace(FAST, max_write_buffer_bytes=1_000_000))
    both.far.transport.pause_reading()
    sent = 0
    while both.near.open and sent < 1_000:
        both.near.send(Cancelled("x" * 100_000))
        sent += 1
        await asyncio.sleep(0)
    assert not both.near.open
    await wait_until(lambda: bool(both.near_owner.reasons))
    assert "bytes unread (max 1,000,000)" in both.near_owner.reasons[0]


async def test_a_flood_is_read_in_slices_with_the_loop_running_between() -> None:
    both = await pair()
    turns = 0

    def turn() -> None:
        nonlocal turns
        turns += 1
        if len(both.far_owner.received) < 20_000:
            asyncio.get_running_loop().call_soon(turn)

    for n in range(20_000):
        both.near.send(Cancelled(str(n)))
    turn()
    await wait_until(lambda: len(both.far_owner.received) == 20_000)
    assert turns > 40
    assert both.far_owner.received[-1] == Cancelled("19999")


@pytest.mark.parametrize("heartbeat", [Heartbeat(5), Heartbeat(-1)], ids=["too many", "less than before"])
async def test_a_receipt_that_cannot_be_true_ends_the_link(heartbeat: Heartbeat) -> None:
    both = await pair()
    both.far.send(heartbeat)
    await wait_until(lambda: bool(both.near_owner.reasons))
    assert "acknowledgement of" in both.near_owner.reasons[0]
