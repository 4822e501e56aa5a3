"""Limits on bodies: on their structure before they are parsed, and on the memory that all of them take.

A parser makes an object of every `{}` and every `""`. Two MiB of them become a gigabyte and seconds of work,
during which a gateway serves nobody else. What is legitimate in large bodies is long text, media, and token
ids, which are cheap; so the limits are on numbers of objects, of strings and of elements.

Counting takes time linear in the size, and is exact only where it must be. Brackets, quotes and commas of all
the bytes are no fewer than those outside strings, and numpy counts them with vector instructions. What a body
is too short for is not counted. Only when there are too many are the strings taken out. Depth needs no pass:
the parsers give up at a few hundred levels.

A body is held from its first byte until it cannot be sent again: an answer has begun, or the request is over.
Many large ones may wait in the queue at once, so their sum is bounded. Whoever sends one more is told with
503 when the budget will have room, by the rate at which bodies are released. Small bodies may fill the last
quarter of the budget, so that a few clients with large ones do not shut everybody out.
"""

import asyncio

import numpy as np

from serve_app.core.routing.rate import DecayingRate
from serve_app.errors import Outcome
from serve_app.serving.gateway.answer.responses import RequestRefused

# Objects and arrays. A message with a tool call has five, a tool's definition some twenty.
MAX_CONTAINERS = 50_000
# Texts, and the names of fields.
MAX_STRINGS = 250_000
# A prompt of token ids has an element for each; contexts end at a million or two.
MAX_ELEMENTS = 2_500_000
# Below this many bytes no body can have so many elements that its parsing is noticed: some 5 ms.
UNCHECKED_BYTES = 64 * 1024

# Of a body that is little but long texts: brackets, quotes and commas, in texts or not.
# Half a mebibyte that has so many, of empty messages for the most part, is read in 3 ms.
_PLAIN_SIGNS = 10_000

_STRUCTURE = bytes(byte for byte in range(256) if byte not in b"[{,")
# Counted at a time, so that what is found of them stays in the processor's cache.
_COUNTED_BYTES = 256 * 1024
# Sets the one bit in which `[` and `{` differ.
_BRACKETS = 0x20


def check_structure(body: bytes) -> None:
    """Refuse a body that would take long to parse.

    Raises:
        RequestRefused: it has too many objects, strings or elements.
    """
    if len(body) <= UNCHECKED_BYTES:
        return
    # A string has two quotes, and elements have a comma between them.
    if len(body) > 2 * MAX_STRINGS:
        quotes = _count(body, ord('"'))
        if quotes > 2 * MAX_STRINGS and quotes - body.count(b'\\"') > 2 * MAX_STRINGS:
            raise _too_many("strings", MAX_STRINGS)
    containers = _count(body, ord("{"), _BRACKETS)
    commas = _count(body, ord(",")) if len(body) > MAX_ELEMENTS else 0
    if containers <= MAX_CONTAINERS and commas <= MAX_ELEMENTS:
        return
    structure = _outside_strings(body)
    commas = structure.count(b",")
    if len(structure) - commas > MAX_CONTAINERS:
        raise _too_many("objects and arrays", MAX_CONTAINERS)
    if commas > MAX_ELEMENTS:
        raise _too_many("elements", MAX_ELEMENTS)


def is_plain(body: bytes) -> bool:
    """Return whether a body is little but long texts, which take a nanosecond or two for each byte."""
    signs = _count(body, ord("{"), _BRACKETS)
    return signs + _count(body, ord('"')) + _count(body, ord(",")) <= _PLAIN_SIGNS


def _count(body: bytes, byte: int, bits: int = 0) -> int:
    """Count the bytes that equal one once some bits are set in them."""
    data = np.frombuffer(body, np.uint8)
    found = 0
    for start in range(0, len(data), _COUNTED_BYTES):
        piece = data[start : start + _COUNTED_BYTES]
        found += int(np.count_nonzero((piece | np.uint8(bits) if bits else piece) == byte))
    return found


def _outside_strings(body: bytes) -> bytes:
    """The opening brackets and the commas of a body that are not part of a string."""
    if b"\\" in body:
        # In this order: what remains before a quote then is one backslash, or none.
        body = body.replace(b"\\\\", b"").replace(b'\\"', b"")
    pieces = body.split(b'"')[::2]
    return b"".join(pieces).translate(None, _STRUCTURE)


def _too_many(what: str, limit: int) -> RequestRefused:
    return RequestRefused(
        Outcome.REJECTED_INVALID,
        f"the body has more than {limit:,} {what}: send fewer, or several requests",
        code="body_too_complex",
    )


# -- memory -----------------------------------------------------------------------------------------------

# A body up to here is small; texts of ordinary chats are.
_SMALL_BYTES = 256 * 1024
_SHARE_OF_LARGE = 0.75
_RATE_S = 10.0
_LEAST_RETRY_S, _MOST_RETRY_S = 1.0, 60.0


class HeldBody:
    """One body.

    Attributes:
        data: its bytes; empty once it was released.
        whole_at: when its last byte had come, on the monotonic clock.
    """

    __slots__ = ("_budget", "_held_bytes", "data", "whole_at")

    def __init__(self, budget: "BodyBudget") -> None:
        self._budget = budget
        self._held_bytes = 0
        self.data: bytes = b""
        self.whole_at = 0.0

    def grow(self, size: int) -> None:
        """Hold more bytes, which have arrived.

        Raises:
            RequestRefused: the budget has no room for that.
        """
        self._budget.take(size, total=self._held_bytes + size)
        self._held_bytes += size

    def release(self) -> None:
        """Release the body. Idempotent."""
        self._budget.give_back(self._held_bytes)
        self._held_bytes, self.data = 0, b""


class BodyBudget:
    """The memory for bodies of one gateway.

    Attributes:
        held_bytes: of all bodies held now.
        max_bytes: what they may take together.
    """

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self._released: DecayingRate | None = None
        self.held_bytes = 0

    def __repr__(self) -> str:
        return f"<BodyBudget {self.held_bytes:,} of {self.max_bytes:,} bytes>"

    def take(self, size: int, *, total: int) -> None:
        """Hold so many bytes more, of a body that has `total` with them.

        Raises:
            RequestRefused: there is no room.
        """
        limit = self.max_bytes if total <= _SMALL_BYTES else int(self.max_bytes * _SHARE_OF_LARGE)
        if self.held_bytes + size > limit:
            raise RequestRefused(
                Outcome.REJECTED_QUEUE_FULL,
                f"this gateway holds {self.held_bytes:,} bytes of waiting requests and has no room for more: "
                "try again, or raise gateway.max_held_body_bytes",
                code="body_memory_full",
                status=503,
                retry_after_s=self._room_in_s(self.held_bytes + size - limit),
            )
        self.held_bytes += size

    def give_back(self, size: int) -> None:
        """Hold so many bytes less."""
        if not size:
            return
        self.held_bytes -= size
        now = asyncio.get_running_loop().time()
        if self._released is None:
            self._released = DecayingRate(_RATE_S, now)
        self._released.add(float(size), now)

    def _room_in_s(self, missing_bytes: int) -> float:
        now = asyncio.get_running_loop().time()
        per_s = self._released.per_s(now) if self._released is not None else 0.0
        return min(max(missing_bytes / per_s, _LEAST_RETRY_S), _MOST_RETRY_S) if per_s else _LEAST_RETRY_S
