"""Length queues: the learned partition of prompt lengths, and Dynamic Queue Routing with bubble queues.

`Partition` is the result of Refine-and-Prune (EWSJF, arXiv 2601.21758, section 4.2). It is learned outside
the core (`serve_app.tuning.strategic_loop`) and replaced as a whole.

`QueueMap` (Dynamic Queue Routing) assigns a queue to any prompt length. A length within a queue belongs to
that queue. A length above the lower neighbour by at most a tolerance belongs to the lower one, and a length
below the upper neighbour by at most a tolerance to the upper one. Any other length gets a *bubble queue*,
centred on it, as wide as the queue below, and clipped to the gap. A bubble queue that stays empty for too
many rounds is removed; learned queues are not.

Source: EWSJF, Algorithm 2 and Appendix D.
"""

import bisect
from collections.abc import Iterator
from dataclasses import dataclass

TOLERANCE_RATIO = 0.10
"""Relative distance beyond a queue's bounds at which a length still belongs to it; 10 % in the paper."""
# Width of a bubble queue if the queue below has no width to copy.
_BUBBLE_WIDTH_TOKENS = 512
# Rounds that a bubble queue may stay empty before it is removed; 20, 30 and 50 are in use.
_BUBBLE_ROUNDS = 30


@dataclass(frozen=True, slots=True, kw_only=True)
class LengthInterval:
    """One learned queue: a cluster of prompt lengths.

    Attributes:
        max_tokens: longest prompt in it; inclusive.
        count: prompts of the sample in it.
    """

    min_tokens: int
    max_tokens: int
    mean_tokens: float
    count: int

    def __post_init__(self) -> None:
        if not 0 < self.min_tokens <= self.mean_tokens <= self.max_tokens:
            raise ValueError(
                "an interval needs 0 < min <= mean <= max, "
                f"got {self.min_tokens}, {self.mean_tokens}, {self.max_tokens}"
            )
        if self.count < 1:
            raise ValueError(f"an interval needs at least one prompt, got count {self.count}")

    @property
    def width_tokens(self) -> int:
        """Width of the interval, at least 1."""
        return max(1, self.max_tokens - self.min_tokens)

    @property
    def density(self) -> float:
        """Prompts per token of width (rho in the paper)."""
        return self.count / self.width_tokens


@dataclass(frozen=True, slots=True)
class Partition:
    """The learned queues by rising length. They do not overlap, but may have gaps between them."""

    intervals: tuple[LengthInterval, ...]

    def __post_init__(self) -> None:
        if not self.intervals:
            raise ValueError("a partition needs at least one interval")
        for lower, upper in zip(self.intervals, self.intervals[1:], strict=False):
            if lower.max_tokens >= upper.min_tokens:
                raise ValueError(
                    f"intervals must be sorted and must not overlap, got one that ends at "
                    f"{lower.max_tokens} before one that begins at {upper.min_tokens}"
                )

    def __len__(self) -> int:
        return len(self.intervals)


@dataclass(slots=True, eq=False)
class LengthQueue:
    """A queue of prompt lengths, learned or a bubble queue.

    Attributes:
        mean_tokens: mean of the sample from which it was learned; for a bubble queue, its centre.
        bubble: whether it is a bubble queue, for lengths in a gap. It is removed after `_BUBBLE_ROUNDS` empty
            rounds.
        empty_rounds: rounds since a bubble queue last held a request.
    """

    min_tokens: int
    max_tokens: int
    mean_tokens: float
    bubble: bool = False
    empty_rounds: int = 0

    @property
    def name(self) -> str:
        """Its bounds, prefixed with `~` for a bubble queue."""
        return f"{'~' if self.bubble else ''}{self.min_tokens}-{self.max_tokens}"


def prior_partition() -> Partition:
    """Return the queues used until any have been learned: one octave of lengths each."""
    octaves = [(2**power, 2 ** (power + 1) - 1) for power in range(5, 17)]
    first = LengthInterval(min_tokens=1, max_tokens=31, mean_tokens=16.0, count=1)
    rest = [
        LengthInterval(min_tokens=low, max_tokens=high, mean_tokens=(low + high) / 2, count=1)
        for low, high in octaves
    ]
    return Partition((first, *rest))


class QueueMap:
    """The queues by rising length. `changes` counts changes of their set."""

    def __init__(self, partition: Partition) -> None:
        self._queues: list[LengthQueue] = []
        # The lower bounds of the queues, for binary search.
        self._min_tokens: list[int] = []
        self._indices: dict[str, int] = {}
        self._has_bubbles = False
        self.changes = 0
        self.replace(partition)

    def replace(self, partition: Partition) -> None:
        """Apply these learned queues, and remove all bubble queues."""
        self._queues = [
            LengthQueue(each.min_tokens, each.max_tokens, each.mean_tokens) for each in partition.intervals
        ]
        self._number()

    def route(self, tokens: int) -> LengthQueue:
        """Return the queue of a prompt of `tokens`. Creates a bubble queue if needed (Algorithm 2)."""
        index = bisect.bisect_right(self._min_tokens, tokens)
        below = self._queues[index - 1] if index else None
        above = self._queues[index] if index < len(self._queues) else None
        if below is not None and tokens <= below.max_tokens * (1 + TOLERANCE_RATIO):
            return below
        if above is not None and tokens >= above.min_tokens * (1 - TOLERANCE_RATIO):
            return above
        return self._bubble(tokens, index, below, above)

    def index(self, name: str) -> int:
        """Return the index of a queue, 0 for the shortest lengths; for a removed queue, that of the last."""
        return self._indices.get(name, len(self._queues) - 1)

    def __getitem__(self, name: str) -> LengthQueue:
        return self._queues[self.index(name)]

    def __len__(self) -> int:
        return len(self._queues)

    def __iter__(self) -> Iterator[LengthQueue]:
        return iter(self._queues)

    def retire_bubbles(self, waiting: set[str]) -> None:
        """Count a round for each empty bubble queue, and remove those that have been empty for too long."""
        if not self._has_bubbles:
            return
        for queue in self._queues:
            queue.empty_rounds = 0 if not queue.bubble or queue.name in waiting else queue.empty_rounds + 1
        remaining = [queue for queue in self._queues if queue.empty_rounds <= _BUBBLE_ROUNDS]
        if len(remaining) < len(self._queues):
            self._queues = remaining
            self._number()

    def _bubble(
        self, tokens: int, index: int, below: LengthQueue | None, above: LengthQueue | None
    ) -> LengthQueue:
        width = _BUBBLE_WIDTH_TOKENS
        if below is not None and below.max_tokens > below.min_tokens:
            width = below.max_tokens - below.min_tokens
        low = max(tokens - width // 2, below.max_tokens + 1 if below else 1)
        high = tokens + width // 2
        if above is not None:
            high = min(high, above.min_tokens - 1)
        bubble = LengthQueue(low, max(high, tokens), float(tokens), bubble=True)
        self._queues.insert(index, bubble)
        self._number()
        return bubble

    def _number(self) -> None:
        self._indices = {queue.name: index for index, queue in enumerate(self._queues)}
        self._min_tokens = [queue.min_tokens for queue in self._queues]
        self._has_bubbles = any(queue.bubble for queue in self._queues)
        self.changes += 1

    def __repr__(self) -> str:
        return f"<QueueMap {' '.join(queue.name for queue in self._queues)}>"
