"""Damaged frames of the control channel: read as messages, or rejected as a whole."""

import random
from typing import Any

import pytest

from serve_app.core.events import Cancelled, DispatchFailure, Finished
from serve_app.errors import ChannelError, Outcome
from serve_app.request import Usage
from serve_app.serving.channel.link import (
    FrameReader,
    decode_from_peer,
    decode_from_scheduler,
    encode_frames,
)
from serve_app.serving.channel.messages import Heartbeat, PutBack, Submit
from tests.serving.channel.harness import submission

_LIMIT = 1 << 20
_MESSAGES = [
    Heartbeat(read=3),
    Submit(submission("r1"), 0.25),
    PutBack("r1", "s1", DispatchFailure.LOST, "gone", 1),
    Finished("r1", Outcome.COMPLETED, Usage(prompt_tokens=7, output_tokens=2)),
    Cancelled("r1"),
]


@pytest.mark.parametrize("decode", [decode_from_peer, decode_from_scheduler])
@pytest.mark.parametrize("seed", range(4))
def test_damage_is_read_or_rejected_and_nothing_else(decode: Any, seed: int) -> None:
    chance = random.Random(seed)
    whole = b"".join(encode_frames([message], _LIMIT) for message in _MESSAGES)
    read = rejected = 0
    for _ in range(3_000):
        stream = bytearray(whole)
        for _ in range(chance.randint(1, 3)):
            at = chance.randrange(len(stream))
            match chance.randrange(3):
                case 0:
                    stream[at] ^= 1 << chance.randrange(8)
                case 1:
                    del stream[at : at + chance.randint(1, 9)]
                case _:
                    stream[at:at] = bytes(chance.randrange(256) for _ in range(chance.randint(1, 9)))
        reader: FrameReader[Any] = FrameReader(decode, _LIMIT)
        try:
            for frame in reader.feed(bytes(stream)):
                read += len(frame)
        except ChannelError:
            rejected += 1
    assert rejected > 300
    assert read > 300
