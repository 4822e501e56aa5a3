"""Labels whose values come from traffic, bounded in number."""

from dataclasses import dataclass, field

OTHERS = "other"
_MOST_TENANTS = 1_000
# Queues that are learned anew have new names.
_MOST_LENGTH_QUEUES = 100


class BoundedNames:
    """The first so many names as they are; all that come later are `other`.

    Args:
        most: how many names there may be besides `other`.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._known: set[str] = set()

    def __call__(self, name: str) -> str:
        """The label for a name."""
        if name in self._known:
            return name
        if len(self._known) >= self._most:
            return OTHERS
        self._known.add(name)
        return name


@dataclass(frozen=True, slots=True)
class Names:
    """The names of one model in metrics: each means the same in all of them."""

    of_tenants: BoundedNames = field(default_factory=lambda: BoundedNames(_MOST_TENANTS))
    of_length_queues: BoundedNames = field(default_factory=lambda: BoundedNames(_MOST_LENGTH_QUEUES))
