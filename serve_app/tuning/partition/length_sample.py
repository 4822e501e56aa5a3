"""A ring of the last `capacity` prompt lengths, from which queues are learned.

It keeps the *last* lengths rather than a random sample of all. After the traffic has changed, the ring holds
only new traffic once `capacity` requests have arrived, while a reservoir keeps old lengths for long. It also
needs no random numbers, so the same requests leave the same sample.
"""

from collections import deque
from collections.abc import Iterable
from itertools import islice

DEFAULT_CAPACITY = 10_000
"""Lengths kept: at 10 to 40 requests a second those of the last 4 to 16 minutes; 80 kB of memory."""


class LengthSample:
    """A bounded sample of recent prompt lengths.

    Attributes:
        observed: how many lengths were ever added, so a learner can tell how many are new.
    """

    __slots__ = ("_recent", "observed")

    def __init__(self, capacity: int = DEFAULT_CAPACITY) -> None:
        if capacity < 1:
            raise ValueError(f"capacity must be at least 1, got {capacity}: {DEFAULT_CAPACITY} is usual")
        self._recent: deque[int] = deque(maxlen=capacity)
        self.observed = 0

    def __repr__(self) -> str:
        return f"<LengthSample {len(self)} of {self.observed} observed>"

    def __len__(self) -> int:
        return len(self._recent)

    def add(self, prompt_tokens: int) -> None:
        """Add the length of a prompt; a number below 1, as an engine may report, is ignored."""
        if prompt_tokens < 1:
            return
        self._recent.append(prompt_tokens)
        self.observed += 1

    def extend(self, lengths: Iterable[int]) -> None:
        """Add several, the oldest first."""
        for prompt_tokens in lengths:
            self.add(prompt_tokens)

    def lengths(self, last: int | None = None) -> tuple[int, ...]:
        """The sample, or only its `last` so many lengths, the oldest first."""
        skipped = 0 if last is None else max(0, len(self._recent) - last)
        return tuple(islice(self._recent, skipped, None))
