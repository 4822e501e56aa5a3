"""Learned capacity: the size of a KV cache that a replica does not report.

The engine's counts of cached tokens bracket it. The model of a replica's contexts (`residency`) yields the
tokens that were used after a context, and all tokens that should be cached:

- A context that is cached shows that at least it and what was used after it fit.
- A context that should be cached and is not shows that not all fit.

The capacity in use is up to `_GROWTH` times what was shown to fit, so that more is tried, but less than what
was shown not to fit. The steps are small, because contexts that are wrongly expected to be cached cost more
than room that is not used. The upper bound rises slowly, and faster while contexts beyond it are cached: a
miss may have other causes, such as other clients of the engine. Engines that never report cached tokens show
nothing, and the assumed capacity remains.
"""

import math

from serve_app.core.routing.prefix.affinity import LIKELY_KV_TOKENS

_GROWTH = 1.05
# Per context beyond the upper bound that is cached, and per any that is cached.
_RISE, _DRIFT = 1.02, 1.0002


class LearnedCapacity:
    """Bracket of the capacity of one replica."""

    def __init__(self) -> None:
        self._least, self._most = 0.0, math.inf
        self._reports_cached = False

    @property
    def tokens(self) -> int:
        """The capacity in use, in tokens."""
        return int(min(max(LIKELY_KV_TOKENS, _GROWTH * self._least), self._most))

    def on_hit(self, depth_tokens: int) -> None:
        """Learn that a context was cached, with so many tokens of it and used after it."""
        self._reports_cached = True
        is_beyond = depth_tokens >= self.tokens
        self._most = max(_DRIFT * self._most, _RISE * depth_tokens if is_beyond else 0.0)
        self._least = max(self._least, depth_tokens)

    def on_miss(self, content_tokens: int) -> None:
        """Learn that a context was not cached although all contents would fit into so many tokens."""
        if self._reports_cached:
            self._most = min(self._most, content_tokens)
            self._least = min(self._least, self._most)

    def __repr__(self) -> str:
        return f"<LearnedCapacity {self.tokens} of {self._least:.0f} to {self._most:.0f}>"
