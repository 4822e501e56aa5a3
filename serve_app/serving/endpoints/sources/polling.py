"""Sources that are read again and again."""

import asyncio
import logging
from collections.abc import Awaitable, Callable

from serve_app.serving.endpoints.url import EndpointUrl

logger = logging.getLogger("ray.serve")


async def poll(
    name: str,
    find: Callable[[], Awaitable[frozenset[EndpointUrl]]],
    tell: Callable[[frozenset[EndpointUrl]], None],
    refresh_s: float,
) -> None:
    """Call `find` for ever, and tell what it found whenever that has changed.

    Args:
        name: of the source, for messages.
        find: raises `OSError` or `ValueError` where the place cannot be read.
        refresh_s: between two calls.
    """
    found: frozenset[EndpointUrl] | None = None
    failed = ""
    while True:
        try:
            now = await find()
        except (OSError, ValueError) as exc:
            # Told once for each cause; what was found last remains.
            if str(exc) != failed:
                logger.warning("event=discovery_failed source=%s reason=%r", name, str(exc))
            failed = str(exc)
        else:
            failed = ""
            if now != found:
                found = now
                tell(now)
        await asyncio.sleep(refresh_s)
