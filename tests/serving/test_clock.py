import asyncio

import uvloop

from serve_app.serving.process import precise_clock
from tests.parity.jumping_loop import run_jumping


def test_it_resolves_less_than_a_millisecond_on_uvloop() -> None:
    async def readings() -> tuple[set[float], set[float]]:
        loop = asyncio.get_running_loop()
        clock = precise_clock(loop)
        pairs = [(clock(), loop.time()) for _ in range(1_000)]
        return {precise for precise, _ in pairs}, {coarse for _, coarse in pairs}

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        precise, coarse = runner.run(readings())

    assert len(precise) > 900
    # The loop's own clock is this coarse, which is why another one exists.
    assert all(abs(at * 1e3 - round(at * 1e3)) < 1e-3 for at in coarse)


def test_it_is_the_clock_that_timers_are_set_on() -> None:
    async def late_by() -> float:
        loop = asyncio.get_running_loop()
        clock = precise_clock(loop)
        rung: asyncio.Future[float] = loop.create_future()
        due = clock() + 0.02
        loop.call_at(due, lambda: rung.set_result(clock()))
        return await rung - due

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        # uvloop rounds timers to whole milliseconds; the upper bound is for a busy machine.
        assert -0.002 <= runner.run(late_by()) < 5


def test_the_clock_of_another_loop_is_its_own() -> None:
    async def passed() -> float:
        clock = precise_clock(asyncio.get_running_loop())
        began = clock()
        await asyncio.sleep(3_600)
        return clock() - began

    assert run_jumping(passed) == 3_600
