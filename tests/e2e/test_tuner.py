"""Strategic loop in the whole application: queues are learned from arrivals."""

import asyncio
import itertools
from collections.abc import Iterator

import httpx
import pytest

from serve_app.cli import main
from tests.e2e.served import ARGS, Served, serve, start_tuner, wait_for

# The first test waits until the application has started; there is no narrower limit on that wait.
pytestmark = pytest.mark.timeout(300)

# In tokens, whose number is exact. That of a text is learned, and queues of early guesses may persist.
SHORT, LONG = 16, 700
# Each prompt begins differently: of a cached one only the rest counts, and 700 tokens would be 60.
BEGINNINGS = itertools.count(1_000)
PATIENCE_S = 200.0


@pytest.fixture(scope="module")
def app_without_queues() -> Iterator[Served]:
    """Yield an application without other learned lengths.

    After other lengths, a wide queue persists where a narrow one would differ too little (`min_distance`).
    """
    with serve({**ARGS, "gateways": {"replicas": 1, "num_cpus": 0.1}}) as served:
        served.wait_until_ready()
        yield served


async def test_two_lengths_of_prompts_get_a_learned_queue_each(app_without_queues: Served) -> None:
    assert app_without_queues.replicas("tuner") == [], "it starts when there is something to learn from"
    await learn_queues(app_without_queues)
    lines = [
        one
        for one in app_without_queues.log_lines("scheduler")
        if "event=partition_changed model=demo" in one
    ]
    assert [one for one in lines if "reason=learned" in one]


async def test_a_new_scheduler_gets_the_current_queues_from_the_tuner(app_without_queues: Served) -> None:
    app = app_without_queues
    await learn_queues(app)
    before = app.metric("ewsjf_scheduler_incarnation")
    app.replicas("scheduler")[0].kill()

    def has_queues() -> bool:
        is_new = app.metric("ewsjf_scheduler_incarnation") > before
        return is_new and app.metric("ewsjf_length_queues", model="demo") >= 2

    # No request arrives in between, so the new scheduler cannot have learned the queues itself.
    await asyncio.to_thread(wait_for, has_queues, PATIENCE_S, "the queues at the new scheduler")
    async with httpx.AsyncClient(base_url=app.url, timeout=PATIENCE_S) as http:
        short, long = await queue_of(http, SHORT), await queue_of(http, LONG)
    assert bounds(short)[1] < bounds(long)[0]


async def learn_queues(app: Served) -> None:
    """Send prompts of two lengths until each has a learned queue."""
    async with httpx.AsyncClient(base_url=app.url, timeout=PATIENCE_S) as http:
        while not (
            is_narrow(short := await queue_of(http, SHORT)) and is_narrow(long := await queue_of(http, LONG))
        ):
            await asyncio.gather(*(queue_of(http, tokens) for tokens in [SHORT] * 6 + [LONG] * 2))
    assert bounds(short)[1] < bounds(long)[0]
    assert app.metric("ewsjf_length_queues", model="demo") >= 2
    assert app.metric("ewsjf_partition_changes_total", model="demo") >= 1
    assert app.metric("ewsjf_partition_age_seconds", model="demo") >= 0


async def queue_of(http: httpx.AsyncClient, tokens: int) -> str:
    body = {"model": "demo", "prompt": [next(BEGINNINGS)] * tokens, "max_tokens": 2}
    answer = await http.post("/v1/completions", json=body)
    assert answer.status_code == 200, answer.text
    return answer.headers["x-length-queue"]


def is_narrow(name: str) -> bool:
    """Return whether it is a learned queue: bubbles are marked, and the prior's queues are an octave wide."""
    return not name.startswith("~") and bounds(name)[1] < 1.5 * bounds(name)[0]


def bounds(name: str) -> tuple[int, int]:
    low, high = name.lstrip("~").split("-")
    return int(low), int(high)


def test_one_command_shows_the_application_and_another_freezes_its_tuner(
    app: Served, capsys: pytest.CaptureFixture[str]
) -> None:
    def shown(*options: str) -> str:
        assert main(["status", "--url", app.url, *options]) == 0
        return capsys.readouterr().out

    start_tuner(app)
    wait_for(lambda: "tuner: on, idle" in shown(), 30, "the parameter tuner")
    page = shown()
    assert "demo" in page
    assert "short" in page
    assert shown("--freeze-tuner").startswith("demo: the tuner is frozen: ")
    assert "frozen by an admin" in shown()
    assert shown("--thaw-tuner").startswith("demo: the tuner ")
    wait_for(lambda: "tuner: on, idle" in shown(), 30, "the tuner to go on")
