"""Long looks in parts, so that whoever needs the event loop meanwhile waits for one part at most."""

import asyncio
from collections.abc import Generator
from typing import TypeVar

Found = TypeVar("Found")


async def in_parts(look: Generator[None, None, Found]) -> Found:
    """What a look finds; others have their turn wherever it yields."""
    while True:
        try:
            next(look)
        except StopIteration as end:
            found: Found = end.value
            return found
        await asyncio.sleep(0)
