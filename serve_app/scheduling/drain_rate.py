"""How fast work leaves, and so when a refused client should come again.

Retry-After = work ahead / measured drain rate, capped. Spread over a quarter more by a hash of the request's
id, so that clients refused together do not return together; a hash instead of a random number, so that the
same events give the same commands.
"""

import zlib

from serve_app.routing.rate import DecayingRate

_TIME_CONSTANT_S = 30.0
_SPREAD = 0.25
# Before anything has finished there is no rate; a second is short enough to be harmless and long enough to
# breathe.
_UNKNOWN_S = 1.0


class DrainRate:
    """Tokens of work concluded per second, and the waits that follow from it."""

    def __init__(self, cap_s: float, now: float) -> None:
        self._cap_s = cap_s
        self._rate = DecayingRate(_TIME_CONSTANT_S, now)

    def add(self, tokens: int, now: float) -> None:
        """Count the work of a request that has left a replica."""
        self._rate.add(tokens, now)

    def tokens_per_s(self, now: float) -> float:
        """The drain rate at `now`."""
        return self._rate.per_s(now)

    def wait_s(self, tokens_ahead: int, now: float) -> float:
        """Seconds until `tokens_ahead` will have left, at most the cap."""
        rate = self._rate.per_s(now)
        return min(self._cap_s, tokens_ahead / rate) if rate > 0 else min(self._cap_s, _UNKNOWN_S)

    def retry_after_s(self, request_id: str, tokens_ahead: int, now: float) -> float:
        """What to tell the client of a refused request, in seconds; never above the cap."""
        spread = zlib.crc32(request_id.encode()) / 2**32 * _SPREAD
        return min(self._cap_s, self.wait_s(tokens_ahead, now) * (1 + spread))
