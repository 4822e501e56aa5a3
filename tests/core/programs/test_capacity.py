"""The learned capacity of a replica that does not report it."""

import pytest

from serve_app.core.events import Finished
from serve_app.core.programs.residency import LearnedCapacity
from serve_app.core.routing.prefix import LIKELY_KV_TOKENS
from serve_app.errors import Outcome
from serve_app.request import TurnEnd, Usage
from tests.core.programs.builders import ProgramDriver, fleet


def learned(*hits: int) -> LearnedCapacity:
    capacity = LearnedCapacity()
    for depth in hits:
        capacity.on_hit(depth)
    return capacity


@pytest.mark.parametrize(
    ("hits", "misses", "tokens"),
    [
        pytest.param((), (), LIKELY_KV_TOKENS, id="no evidence"),
        pytest.param((5_000,), (), LIKELY_KV_TOKENS, id="a small context is cached"),
        pytest.param((200_000,), (), 210_000, id="a deeper context is cached: a little beyond it"),
        pytest.param((30_000,), (60_000,), 60_000, id="a context is not cached"),
        pytest.param((), (60_000,), LIKELY_KV_TOKENS, id="the engine has reported no cached tokens"),
        pytest.param((300_000,), (200_000,), 200_000, id="a refuted lower bound is forgotten"),
    ],
)
def test_hits_and_misses_bound_the_capacity(
    hits: tuple[int, ...], misses: tuple[int, ...], tokens: int
) -> None:
    capacity = learned(*hits)
    for depth in misses:
        capacity.on_miss(depth)
    assert capacity.tokens == tokens


def test_an_upper_bound_that_was_refuted_rises_with_every_refutation() -> None:
    capacity = learned(30_000)
    capacity.on_miss(60_000)
    seen = [capacity.tokens]
    for _ in range(60):
        capacity.on_hit(capacity.tokens)
        seen.append(capacity.tokens)
    assert seen == sorted(set(seen))
    assert seen[-1] > 2 * seen[0]


def test_an_upper_bound_is_forgotten_slowly() -> None:
    capacity = learned(30_000)
    capacity.on_miss(60_000)
    for _ in range(100):
        capacity.on_hit(30_000)
    assert 60_000 < capacity.tokens < 66_000


def test_it_converges_on_the_size_of_a_cache() -> None:
    capacity, actual, depth = LearnedCapacity(), 400_000, 0
    for _ in range(500):
        # Contexts of 20,000 tokens return from every depth that is expected to be cached, or is a bit deeper.
        depth = depth + 20_000 if depth < 1.1 * capacity.tokens else 20_000
        if depth <= actual:
            capacity.on_hit(depth)
        elif depth <= capacity.tokens:
            capacity.on_miss(capacity.tokens)
    assert capacity.tokens == pytest.approx(actual, rel=0.1)


# In the scheduler


def hidden() -> ProgramDriver:
    driver = fleet()
    driver.join_fleet("s1", kv_tokens=None)
    return driver


def turn(driver: ProgramDriver, name: str, number: int, context: int, cached: int) -> None:
    """Play a turn of a conversation whose prompt extends the last one."""
    prefix = tuple(hash((name, block)) for block in range(10 + number))
    driver.start_turn(f"{name}{number}", name, prompt_tokens=context, prefix=prefix, messages=2 + 2 * number)
    while driver.programs.parked:
        driver.wake()
    usage = Usage(prompt_tokens=context, output_tokens=10, cached_tokens=cached, ending=TurnEnd.TOOLS)
    driver.feed(Finished(f"{name}{number}", Outcome.COMPLETED, usage), after_s=1.0)


def test_a_reported_capacity_is_used_as_it_is() -> None:
    driver = fleet("s1", kv_tokens=150_000)
    turn(driver, "a", 0, 60_000, 0)
    turn(driver, "a", 1, 61_000, 60_000)
    assert driver.programs.capacity(driver.scheduler.ledger["s1"]) == 150_000
    assert "of 0 to inf" in repr(driver.contexts().capacity)


def test_contexts_that_the_model_evicts_and_the_engine_does_not_raise_the_capacity() -> None:
    driver = hidden()
    state = driver.scheduler.ledger["s1"]
    for number in range(3):
        for name in "abc":
            turn(driver, name, number, 60_000 + number, 0 if number == 0 else 60_000)
    assert 180_000 < driver.programs.capacity(state) < 200_000
    assert all(driver.conversation(name).replica_id == "s1" for name in "abc")


def test_contexts_that_the_engine_evicts_and_the_model_does_not_lower_the_capacity() -> None:
    driver = hidden()
    state = driver.scheduler.ledger["s1"]
    turn(driver, "a", 0, 20_000, 0)
    turn(driver, "a", 1, 20_100, 20_000)
    turn(driver, "b", 0, 30_000, 0)
    turn(driver, "a", 2, 20_200, 0)
    assert driver.programs.capacity(state) < 60_000


def test_a_shorter_context_that_is_not_cached_shows_nothing() -> None:
    driver = hidden()
    turn(driver, "a", 0, 900, 0)
    turn(driver, "a", 1, 950, 800)
    turn(driver, "a", 2, 990, 0)
    assert driver.programs.capacity(driver.scheduler.ledger["s1"]) == LIKELY_KV_TOKENS
