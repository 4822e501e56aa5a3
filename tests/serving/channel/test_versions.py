"""Two releases at once: a peer of the previous protocol version is served as that version defines.

These tests define the next release.
"""

from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from serve_app.core.events import Cancelled, DispatchFailure, Finished, FirstToken, Message
from serve_app.errors import ChannelError, Outcome
from serve_app.request import DecodeGap, RequestTimes
from serve_app.serving.channel import connector, link, messages, server
from serve_app.serving.channel.messages import (
    OLDEST_VERSION,
    VERSION,
    PeerRejected,
    PutBack,
    ReplicaTable,
    SnapshotEnd,
    Submit,
    Welcome,
    common_version,
    to_previous_version,
)
from tests.serving.channel.harness import ControlPlane, RawPeer, hello, submission


def test_what_gateways_report_about_a_request_is_sent_as_version_4_defines() -> None:
    times = RequestTimes("/v1/completions", 0.1, 0.2, None, 0.5)
    reported = [
        FirstToken("r1"),
        PutBack("r1", "s1", DispatchFailure.LOST, "it broke", 1),
        Finished("r1", Outcome.COMPLETED, None, times, DecodeGap(0.3, 0.1)),
        Cancelled("r1"),
    ]
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(reported)) == [
        ["first", "r1"],
        ["putback", "r1", "s1", "lost", "it broke", 1, 0, None],
        [
            "finish",
            "r1",
            "completed",
            None,
            ["/v1/completions", 0.1, 0.2, None, 0.5, None, 0.0],
            [0.3, 0.1],
            0,
        ],
        ["cancel", "r1"],
    ]


def test_a_scheduler_of_version_3_gets_the_times_that_it_knows() -> None:
    times = RequestTimes("/v1/completions", 0.1, 0.2, None, 0.5, earlier_s=0.7)
    for sent in (times, None):
        before = to_previous_version(Finished("r1", Outcome.COMPLETED, None, sent))
        [_, _, _, _, found, *_] = msgspec.msgpack.decode(msgspec.msgpack.encode(before))
        assert found == (sent and ["/v1/completions", 0.1, 0.2, None, 0.5, None])


def test_a_put_back_of_version_3_asks_for_no_pause() -> None:
    before = msgspec.msgpack.encode(["putback", "r1", "s1", "busy", "429", 1, 0])
    assert msgspec.msgpack.decode(before, type=PutBack).retry_after_s is None


@pytest.fixture
def next_release(monkeypatch: pytest.MonkeyPatch) -> None:
    """Define a release one version higher, whose previous version has no replica table."""
    for module in (messages, connector, link, server):
        monkeypatch.setattr(module, "VERSION", VERSION + 1, raising=False)
    changes: dict[type[Message], Callable[[Any], Message | None]] = {ReplicaTable: lambda _: None}
    monkeypatch.setattr(messages, "_AS_BEFORE", changes)


@pytest.mark.usefixtures("next_release")
async def test_a_peer_of_the_previous_version_is_served_without_newer_messages(
    control_plane: ControlPlane,
) -> None:
    await control_plane.replica("s1")
    raw_peer = await RawPeer.at(control_plane.endpoint())
    raw_peer.send(hello(control_plane.endpoint(), version=VERSION))
    await raw_peer.receive(Welcome)
    raw_peer.send(Submit(submission("r1"), 0.0), SnapshotEnd())
    assert (await raw_peer.receive(messages.Granted)).dispatch.request_id == "r1"
    assert not any(isinstance(each, ReplicaTable) for each in raw_peer.received)


@pytest.mark.parametrize("theirs", [OLDEST_VERSION - 1, VERSION + 1])
async def test_a_peer_of_another_version_is_rejected_with_the_remedy(
    control_plane: ControlPlane, theirs: int
) -> None:
    raw_peer = await RawPeer.at(control_plane.endpoint())
    raw_peer.send(hello(control_plane.endpoint(), version=theirs))
    reason = (await raw_peer.receive(PeerRejected)).reason
    assert f"protocol version {theirs}, this scheduler supports {OLDEST_VERSION} to {VERSION}" in reason
    assert "upgrade by one version at a time" in reason


def test_a_peer_chooses_the_highest_version_that_both_speak() -> None:
    assert common_version(VERSION) == common_version(VERSION + 1) == VERSION
    with pytest.raises(ChannelError, match="upgrade by one version at a time"):
        common_version(OLDEST_VERSION - 1)
