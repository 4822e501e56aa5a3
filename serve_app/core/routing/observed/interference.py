"""Interference of prefills: whether a long prompt delays the other requests of an engine.

An engine that computes prefills in its batch delays every request of the batch by a long one, so isolation
limits those in flight. The requests of a provider, or of a server with a process for each, do not touch each
other, and such a limit would only delay long prompts. Engines that report their queue are known to compute
prefills in their batch. For others, the starts of short prompts are the evidence: recent ones that were
beside a long prefill are compared with recent ones that were not.

Their ranks are compared. The difference must be significant to be believed, and large enough to matter. The
belief ends when they no longer differ.
"""

from collections import deque
from statistics import median

from serve_app.core.routing.observed.ranks import rank_deviations

_RECENT, _LEAST, _EVERY = 64, 8, 8
# Standard deviations of the rank sum under equal times.
_SIGNIFICANT, _INSIGNIFICANT = 3.5, 1.0
_MATTERS, _MATTERS_S = 1.2, 0.01


class PrefillInterference:
    """Compares the starts of short prompts with and without a long prefill beside them.

    Attributes:
        is_shown: whether long prefills were seen to delay short prompts.
    """

    __slots__ = ("_recent", "_seen", "is_shown")

    def __init__(self) -> None:
        self.is_shown = False
        self._seen = 0
        # (seconds, whether beside a long prefill) by kind of prompt.
        self._recent: dict[int, deque[tuple[float, bool]]] = {}

    def __repr__(self) -> str:
        return f"<PrefillInterference{' shown' if self.is_shown else ''} n={self._seen}>"

    def on_start(self, kind: int, seconds: float, *, beside_long: bool) -> bool:
        """Record the start of a short prompt. Return whether the belief has changed.

        Args:
            kind: prompts of one kind take about the same time.
        """
        recent = self._recent.get(kind)
        if recent is None:
            recent = self._recent[kind] = deque(maxlen=_RECENT)
        recent.append((seconds, beside_long))
        self._seen += 1
        if self._seen % _EVERY:
            return False
        beside = [each for each, is_beside in recent if is_beside]
        alone = [each for each, is_beside in recent if not is_beside]
        if min(len(beside), len(alone)) < _LEAST:
            return False
        deviations = rank_deviations(beside, alone)
        matters = median(beside) > _MATTERS * median(alone) + _MATTERS_S
        before = self.is_shown
        if deviations > _SIGNIFICANT and matters:
            self.is_shown = True
        elif deviations < _INSIGNIFICANT:
            self.is_shown = False
        return self.is_shown != before
