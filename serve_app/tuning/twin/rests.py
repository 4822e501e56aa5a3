"""Rests within long work of the twin, for a driver that may use only a share of a core."""

from collections.abc import Callable

_REST_EVERY = 2_000
"""Events of the scheduler between two rests: some 50 ms of work."""


def resting(rest: Callable[[], object]) -> Callable[[object], None]:
    """What is called with each event of a simulation, and rests now and then."""
    events = 0

    def count_event(_: object) -> None:
        nonlocal events
        events += 1
        if events % _REST_EVERY == 0:
            rest()

    return count_event
