"""Frames of the control channel with damage: each is read as messages, or refused as a whole."""

import random

import pytest

from serve_app.errors import ChannelError
from serve_app.serving.channel import messages
from serve_app.serving.channel.framing import (
    FrameReader,
    decode_from_peer,
    decode_from_scheduler,
    encode_frames,
)
