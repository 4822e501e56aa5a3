"""Strategic loop in the whole application: queues are learned from arrivals."""

import asyncio
import itertools

import httpx
import pytest

from serve_app.cli import main
from tests.e2e.served import Served, wait_for

# The first test waits until the application has started; there is no narrower limit on that wait.
pytestmark = pytest.mark.timeout(300)

# In tokens, whose number is exact.
SHORT, LONG = 16, 700
# Each prompt begins differently: of a cached one only the rest counts, and 700 tokens would be 60.
BEGINNINGS = itertools.count(1_000)
PATIENCE_S = 200.0


async def test_queues_are_learned_and_a_new_scheduler_gets_them_from_the_tuner(app: Served) -> None:
    async with httpx.AsyncClient(base_url=app.url, timeout=PATIENCE_S) as http:
        while not was_learned(app):
            await asyncio.gather(*(queue_of(http, tokens) for tokens in [SHORT] * 6 + [LONG] * 2))
        await two_lengths_have_two_queues(http)
        before = app.metric("ewsjf_scheduler_incarnation")
        app.replicas("scheduler")[0].kill()

        def has_queues() -> bool:
            is_new = app.metric("ewsjf_scheduler_incarnation") > before
            restored = app.metric("ewsjf_partition_changes_total", model="demo", reason="restored")
            return is_new and restored == 1 and app.metric("ewsjf_length_queues", model="demo") >= 2

        # No request arrives in between, so the new scheduler cannot have learned the queues itself.
        await asyncio.to_thread(wait_for, has_queues, PATIENCE_S, "the queues at the new scheduler")
        assert app.metric("ewsjf_partition_age_seconds", model="demo") >= 0
        await two_lengths_have_two_queues(http)


def was_learned(app: Served) -> bool:
    """Return whether a scheduler, which may have ended, got queues that its tuner had learned."""
    lines = [one for one in app.log_lines("scheduler") if "event=partition_changed model=demo" in one]
    return any("reason=learned" in one for one in lines)


async def two_lengths_have_two_queues(http: httpx.AsyncClient) -> None:
    short, long = await queue_of(http, SHORT), await queue_of(http, LONG)
    assert bounds(short)[1] < bounds(long)[0]


async def queue_of(http: httpx.AsyncClient, tokens: int) -> str:
    body = {"model": "demo", "prompt": [next(BEGINNINGS)] * tokens, "max_tokens": 2}
    answer = await http.post("/v1/completions", json=body)
    assert answer.status_code == 200, answer.text
    return answer.headers["x-length-queue"]


def bounds(name: str) -> tuple[int, int]:
    low, high = name.lstrip("~").split("-")
    return int(low), int(high)


def test_one_command_shows_the_application_and_another_freezes_its_tuner(
    app: Served, capsys: pytest.CaptureFixture[str]
) -> None:
    def shown(*options: str) -> str:
        assert main(["status", "--url", app.url, *options]) == 0
        return capsys.readouterr().out

    wait_for(lambda: "tuner: on, idle" in shown(), 30, "the parameter tuner")
    page = shown()
    assert "demo" in page
    assert "short" in page
    assert shown("--freeze-tuner").startswith("demo: the tuner is frozen: ")
    assert "frozen by an admin" in shown()
    assert shown("--thaw-tuner").startswith("demo: the tuner ")
    wait_for(lambda: "tuner: on, idle" in shown(), 30, "the tuner to go on")
