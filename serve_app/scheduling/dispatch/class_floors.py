"""In which order do the priority classes go, and what keeps the lowest from starving?

Interactive goes before default, default before batch, always; but of every hundred dispatches made while a
lower class waits, that class gets its floor share. Credit for it is saved up a little and never lent.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from serve_app.request import PriorityClass

# Dispatches that a class may have saved up; more would come as a burst in front of those above it.
_SAVED = 2.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ClassFloorSettings:
    """Least shares of the dispatches, while the class waits."""

    __pydantic_config__: ClassVar[Mapping[str, Any]] = {"extra": "forbid"}

    # A tenth is enough that nobody's program times out behind a flood of interactive requests.
    default_share: float = 0.1
    # Batch work is to come through some day, not today.
    batch_share: float = 0.02

    def __post_init__(self) -> None:
        for name in ("default_share", "batch_share"):
            if not 0 <= getattr(self, name) <= 0.5:
                raise ValueError(f"class_floors.{name} must be from 0 to 0.5, got {getattr(self, name)}")

    def share(self, priority: PriorityClass) -> float:
        """Floor share of one class; that of the highest is 0, since nobody goes before it."""
        shares = {PriorityClass.DEFAULT: self.default_share, PriorityClass.BATCH: self.batch_share}
        return shares.get(priority, 0.0)


class ClassFloors:
    """Counts what each class has got, and says when one is owed a dispatch."""

    def __init__(self, settings: ClassFloorSettings) -> None:
        self._settings = settings
        self._credit = dict.fromkeys(PriorityClass, 0.0)

    def owed(self) -> list[PriorityClass]:
        """Classes that may go first now, the highest first."""
        return [priority for priority, credit in self._credit.items() if credit >= 1.0]

    def on_dispatch(self, priority: PriorityClass, waiting: Iterable[PriorityClass]) -> None:
        """A request of a class was dispatched, while those classes waited."""
        if self._credit[priority] >= 1.0:
            self._credit[priority] -= 1.0
        for other in waiting:
            if other is not priority:
                self._credit[other] = min(_SAVED, self._credit[other] + self._settings.share(other))
