"""Limits on the structure of a body, checked before it is parsed, in time linear in its size.

A parser makes an object of every `{}` and every `""`. Two MiB of them become a gigabyte and seconds of work,
during which a gateway serves nobody else. What is legitimate in large bodies is long text, media, and token
ids, which are cheap; so the limits are on numbers of objects, of strings and of elements.

Counting is exact only where it must be. Brackets, quotes and commas of all the bytes are no fewer than those
outside strings, and numpy counts them with vector instructions. What a body is too short for is not counted.
Only when there are too many are the strings taken out. Depth needs no pass: the parsers give up at a few
hundred levels.
"""

import numpy as np

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
    """Whether a body is little but long texts, which take a nanosecond or two for each byte."""
    signs = _count(body, ord("{"), _BRACKETS)
    return signs + _count(body, ord('"')) + _count(body, ord(",")) <= _PLAIN_SIGNS


def _count(body: bytes, byte: int, bits: int = 0) -> int:
    """How many bytes are this one once these bits are set in them."""
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
