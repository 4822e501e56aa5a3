"""The guarded call of observers: metrics, traces and logs never change what happens to a request."""

import logging
from collections.abc import Callable
from typing import TypeVar

logger = logging.getLogger("ray.serve")
R = TypeVar("R")

_logged: set[tuple[str, type[Exception]]] = set()


def observe(call: Callable[..., R], *args: object) -> R | None:
    """Call an observer and return its result, or None if it fails. The first fault of each kind is logged."""
    try:
        return call(*args)
    except Exception as error:
        name = getattr(call, "__qualname__", repr(call))
        if (kind := (name, type(error))) not in _logged:
            _logged.add(kind)
            logger.exception("event=observer_failed observer=%s", name)
        return None
