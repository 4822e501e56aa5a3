"""Which prompt lengths arrived lately? A ring of the last `capacity` of them.

The *last* ones rather than a random choice of all: after the traffic has changed, a ring consists of the new
traffic as soon as `capacity` requests have come, while a reservoir keeps the old in it for long. It needs no
chance either, so that the same requests leave the same sample.
"""

from collections import deque
from collections.abc import Iterable
from itertools import islice

from serve_app.routing.snapshot import Snapshot, number

DEFAULT_CAPACITY = 10_000
"""Lengths kept: at 10 to 40 requests a second those of the last 4 to 16 minutes; 80 kB of memory."""


class LengthSample:
    """A bounded sample of recent prompt lengths.

    Attributes:
        observed: how many lengths were ever added; tells whoever learns from it how many are new.
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
        """Take in the length of a prompt; ignores what is none, as an engine may report."""
        if prompt_tokens < 1:
            return
        self._recent.append(prompt_tokens)
        self.observed += 1

    def extend(self, lengths: Iterable[int]) -> None:
        """Take in several, the oldest first."""
        for prompt_tokens in lengths:
            self.add(prompt_tokens)

    def lengths(self, last: int | None = None) -> tuple[int, ...]:
        """The sample, or only the `last` so many that came, the oldest first."""
        skipped = 0 if last is None else max(0, len(self._recent) - last)
        return tuple(islice(self._recent, skipped, None))

    def state(self) -> dict[str, object]:
        """Everything kept, in plain values, for `restore`."""
        return {"lengths": list(self._recent), "observed": self.observed}

    def restore(self, state: Snapshot) -> None:
        """Take over what `state` returned; of more than the capacity only the last.

        Raises:
            ValueError: something is missing or is no length; nothing is taken over then.
        """
        lengths = state.get("lengths")
        if not isinstance(lengths, list) or not all(_is_length(length) for length in lengths):
            raise ValueError(
                f"learned state: 'lengths' should be a list of prompt lengths, got {str(lengths)[:80]!r}; "
                "delete the state to learn anew"
            )
        observed = int(number(state, "observed", at_least=len(lengths)))
        self._recent.clear()
        self._recent.extend(lengths)
        self.observed = observed


def _is_length(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1
