"""Class floors: the least share of dispatches that a lower priority class gets while it waits.

Interactive is dispatched before default, and default before batch. But of every hundred dispatches made while
a lower class waits, that class gets its floor share. Credit for them is saved up to a small bound.
"""

from collections.abc import Iterable
from typing import Annotated

from serve_app.core.settings_base import between, settings
from serve_app.request import PriorityClass

# Dispatches that a class may save up; more would be a burst ahead of the higher classes.
_SAVED = 2.0


@settings(block="class_floors")
class ClassFloorSettings:
    """Least shares of the dispatches while the class waits."""

    # A tenth is enough that no program times out behind a flood of interactive requests.
    default_share: Annotated[float, between(0, 0.5)] = 0.1
    # Batch work has to progress, not to finish soon.
    batch_share: Annotated[float, between(0, 0.5)] = 0.02

    def share(self, priority: PriorityClass) -> float:
        """Floor share of one class; that of the highest is 0, since no class is dispatched before it."""
        shares = {PriorityClass.DEFAULT: self.default_share, PriorityClass.BATCH: self.batch_share}
        return shares.get(priority, 0.0)


class ClassFloors:
    """Counts the dispatches of each class, and names the classes that are owed one."""

    def __init__(self, settings: ClassFloorSettings) -> None:
        self._settings = settings
        self._credit = dict.fromkeys(PriorityClass, 0.0)

    def owed(self) -> list[PriorityClass]:
        """Classes that have earned a dispatch before the others, the highest first."""
        return [priority for priority, credit in self._credit.items() if credit >= 1.0]

    def on_dispatch(self, priority: PriorityClass, waiting: Iterable[PriorityClass]) -> None:
        """A request of a class was dispatched while the `waiting` classes waited."""
        if self._credit[priority] >= 1.0:
            self._credit[priority] -= 1.0
        for other in waiting:
            if other is not priority:
                self._credit[other] = min(_SAVED, self._credit[other] + self._settings.share(other))
