"""The learned partition of prompt lengths into length queues, as a value.

It is the result of Refine-and-Prune (EWSJF, arXiv 2601.21758, section 4.2). It is learned outside the core
(`serve_app.tuning.refine_and_prune`), and replaced as a whole.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class LengthInterval:
    """One learned queue: a cluster of prompt lengths.

    Attributes:
        min_tokens: shortest prompt in it.
        max_tokens: longest prompt in it; inclusive.
        mean_tokens: their mean.
        count: prompts of the sample in it.
    """

    min_tokens: int
    max_tokens: int
    mean_tokens: float
    count: int

    def __post_init__(self) -> None:
        if not 0 < self.min_tokens <= self.mean_tokens <= self.max_tokens:
            raise ValueError(
                f"an interval needs 0 < min <= mean <= max, got {self.min_tokens}, {self.mean_tokens}, "
                f"{self.max_tokens}"
            )
        if self.count < 1:
            raise ValueError(f"an interval holds at least one prompt, got count {self.count}")

    @property
    def width_tokens(self) -> int:
        """Extent of the interval, at least 1."""
        return max(1, self.max_tokens - self.min_tokens)

    @property
    def density(self) -> float:
        """Prompts per token of width (rho in the paper)."""
        return self.count / self.width_tokens


@dataclass(frozen=True, slots=True)
class Partition:
    """Learned queues, the shortest lengths first; they do not overlap, but may have gaps between them.

    Attributes:
        intervals: at least one.
    """

    intervals: tuple[LengthInterval, ...]

    def __post_init__(self) -> None:
        if not self.intervals:
            raise ValueError("a partition has at least one interval")
        for lower, upper in zip(self.intervals, self.intervals[1:], strict=False):
            if lower.max_tokens >= upper.min_tokens:
                raise ValueError(
                    f"intervals must be in order and apart, got one that ends at {lower.max_tokens} before "
                    f"one that begins at {upper.min_tokens}"
                )

    def __len__(self) -> int:
        return len(self.intervals)
