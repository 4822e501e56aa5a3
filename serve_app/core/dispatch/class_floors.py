"""Class floors: the minimum share of dispatches of a lower class while it has queued requests.

Higher classes are dispatched first. But of the dispatches made while a lower class waits, it gets its floor
share, or the share of promotions while one of its requests is beyond its starvation bound. Credit for them
accumulates up to a small bound.
"""

from collections.abc import Collection, Iterable
from typing import Annotated

from serve_app.core.settings_base import between, settings
from serve_app.request import PriorityClass

# Maximum credit of a class; more would be a burst ahead of the higher classes.
_SAVED_DISPATCHES = 2.0


@settings(block="class_floors")
class ClassFloorSettings:
    """Minimum shares of the dispatches while a class has queued requests."""

    # Share of the default class. A tenth prevents timeouts behind a flood of interactive requests.
    default_share: Annotated[float, between(0, 0.5)] = 0.1
    # Share of the batch class. It ensures progress, not early completion.
    batch_share: Annotated[float, between(0, 0.5)] = 0.02

    def share(self, priority: PriorityClass) -> float:
        """Return the floor share of a class. That of the highest class is 0, as no class precedes it."""
        shares = {PriorityClass.DEFAULT: self.default_share, PriorityClass.BATCH: self.batch_share}
        return shares.get(priority, 0.0)


class ClassFloors:
    """Counts the dispatches of each class, and determines which classes are owed one."""

    def __init__(self, settings: ClassFloorSettings, promoted_share: float = 0.0) -> None:
        self._settings = settings
        self._promoted_share = promoted_share
        self._credit = dict.fromkeys(PriorityClass, 0.0)

    def owed(self) -> list[PriorityClass]:
        """Return the classes that are owed a dispatch before the others, the highest first."""
        return [priority for priority, credit in self._credit.items() if credit >= 1.0]

    def on_dispatch(
        self,
        priority: PriorityClass,
        waiting: Iterable[PriorityClass],
        starved: Collection[PriorityClass] = (),
    ) -> None:
        """Count a dispatch of one class while the `waiting` classes have queued requests.

        Args:
            starved: classes with a request beyond its starvation bound.
        """
        if self._credit[priority] >= 1.0:
            self._credit[priority] -= 1.0
        for other in waiting:
            if other is not priority:
                promoted_share = self._promoted_share if other in starved else 0.0
                credit = self._credit[other] + max(self._settings.share(other), promoted_share)
                self._credit[other] = min(_SAVED_DISPATCHES, credit)
