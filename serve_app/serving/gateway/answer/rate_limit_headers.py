"""The headers that tell how the limits of a key stand, under the names that OpenAI gave them."""

import math

from serve_app.rate_limits import LimitStatus, RateLimitStatus

RATE_LIMIT_HEADERS = tuple(
    f"x-ratelimit-{figure}-{unit}"
    for unit in ("requests", "tokens")
    for figure in ("limit", "remaining", "reset")
)


def rate_limit_headers(status: RateLimitStatus | None) -> list[tuple[bytes, bytes]]:
    """Three headers for each limit per minute that the key has."""
    if status is None:
        return []
    return [*_of(b"requests", status.requests), *_of(b"tokens", status.tokens)]


def _of(unit: bytes, status: LimitStatus | None) -> list[tuple[bytes, bytes]]:
    if status is None:
        return []
    return [
        (b"x-ratelimit-limit-" + unit, b"%d" % status.limit),
        (b"x-ratelimit-remaining-" + unit, b"%d" % status.remaining),
        (b"x-ratelimit-reset-" + unit, duration(status.reset_s)),
    ]


def duration(seconds: float) -> bytes:
    """A time as OpenAI writes it: `250ms`, `12.5s`, `1m0.5s`; rounded up to a tenth of a second."""
    if seconds <= 0:
        return b"0s"
    if seconds < 1:
        return b"%dms" % math.ceil(seconds * 1000)
    minutes, rest = divmod(math.ceil(round(seconds * 10, 6)), 600)
    text = f"{rest / 10:g}s".encode()
    return b"%dm" % minutes + text if minutes else text
