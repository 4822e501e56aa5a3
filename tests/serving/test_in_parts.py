import asyncio
from collections.abc import Generator

import pytest

from serve_app.serving.process import run_in_parts


async def test_others_have_their_turn_after_each_part() -> None:
    happened: list[str] = []

    def look() -> Generator[None, None, int]:
        for part in range(3):
            happened.append(f"part {part}")
            yield
        return 7

    async def other() -> None:
        for turn in range(3):
            happened.append(f"turn {turn}")
            await asyncio.sleep(0)

    found, _ = await asyncio.gather(run_in_parts(look()), other())

    assert found == 7
    assert happened == ["part 0", "turn 0", "part 1", "turn 1", "part 2", "turn 2"]


async def test_an_error_in_a_part_is_raised() -> None:
    def look() -> Generator[None, None, int]:
        yield
        raise KeyError("gone")

    with pytest.raises(KeyError, match="gone"):
        await run_in_parts(look())
