"""What a client says of its own trace: the header `traceparent` of W3C Trace Context."""

import re
from collections.abc import Mapping
from typing import NamedTuple

_SAMPLED = 0x01
# A later version may have more behind a further hyphen; version ff is none.
_TRACEPARENT = re.compile(rb"(?!ff)[0-9a-f]{2}-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(?:-.*)?")
_NO_TRACE = b"0" * 32
_NO_SPAN = b"0" * 16


class TraceParent(NamedTuple):
    """The span from which a request comes.

    Attributes:
        trace_id: 32 hexadecimal digits.
        span_id: 16 hexadecimal digits.
    """

    trace_id: bytes
    span_id: bytes
    flags: int

    @property
    def is_sampled(self) -> bool:
        """Whether whoever sent it keeps the trace."""
        return bool(self.flags & _SAMPLED)


def trace_parent(headers: Mapping[bytes, bytes]) -> TraceParent | None:
    """The parent that a request names; None where it names none, or one that cannot be."""
    given = headers.get(b"traceparent")
    if given is None:
        return None
    found = _TRACEPARENT.fullmatch(given)
    if found is None or found[1] == _NO_TRACE or found[2] == _NO_SPAN:
        return None
    # Version 00 has nothing behind its flags.
    if given.startswith(b"00") and len(given) != 55:
        return None
    return TraceParent(found[1], found[2], int(found[3], 16))
