"""Effect on clients when a part of a running application is killed."""

import asyncio
import json
import re
import signal
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import partial

import httpx
import psutil
import pytest

from tests.e2e.served import Served, wait_for

# The first test of a session waits until the application has started.
pytestmark = [pytest.mark.application, pytest.mark.timeout(300)]

SCHEDULED = 100
LIMITS = httpx.Limits(max_connections=None)


@dataclass(frozen=True)
class Answer:
    """The answer to one streamed request."""

    name: str
    status: int
    tokens: int
    ends: int
    errors: int


def body(name: str, max_tokens: int, *, stream: bool) -> dict[str, object]:
    options = {"stream": True, "stream_options": {"include_usage": True}} if stream else {}
    content = f"{name}: tell me something."
    messages = [{"role": "user", "content": content}]
    return {"model": "demo", "messages": messages, "max_tokens": max_tokens, "ignore_eos": True, **options}


async def streamed(http: httpx.AsyncClient, name: str, max_tokens: int) -> Answer:
    """Request exactly `max_tokens` tokens; count tokens, ends and errors."""
    tokens = ends = errors = 0
    request = body(name, max_tokens, stream=True)
    headers = {"x-request-id": name, "x-ewsjf-queue": "comments"}
    async with http.stream("POST", "/v1/chat/completions", json=request, headers=headers) as response:
        async for line in response.aiter_lines():
            if line == "data: [DONE]":
                ends += 1
            elif line.startswith("data: "):
                event = json.loads(line.removeprefix("data: "))
                errors += "error" in event
                tokens += (event.get("usage") or {}).get("completion_tokens", 0)
        return Answer(name, response.status_code, tokens, ends, errors)


async def under_load(
    app: Served,
    requests: int,
    one: Callable[[httpx.AsyncClient, int], Awaitable[Answer]],
    strike: Callable[[], object],
) -> list[Answer]:
    """Start the requests within two seconds, and call `strike` in the middle."""
    async with httpx.AsyncClient(base_url=app.url, timeout=90, limits=LIMITS) as http:

        async def start(number: int) -> Answer:
            await asyncio.sleep(number * 2.0 / requests)
            return await one(http, number)

        tasks = [asyncio.create_task(start(number)) for number in range(requests)]
        await asyncio.sleep(1.0)
        await asyncio.to_thread(strike)
        return await asyncio.gather(*tasks)


def kill_one(app: Served, deployment: str) -> psutil.Process:
    victim: psutil.Process = app.replicas(deployment)[0]
    victim.send_signal(signal.SIGKILL)
    victim.wait(10)
    return victim


def attempts_by_request(app: Served, prefix: str) -> Counter[str]:
    """Count the dispatches of each completed request, by its client's ID."""
    found: Counter[str] = Counter()
    for line in app.log_lines("gateway"):
        concluded = re.search(
            r"event=concluded outcome=completed .*attempts=(\d+).* client_request_id=(\S+)", line
        )
        if concluded and concluded[2].startswith(prefix):
            found[concluded[2]] += int(concluded[1])
    return found


async def test_a_killed_scheduler_costs_no_request_and_answers_none_twice(app: Served) -> None:
    answers = await under_load(
        app,
        SCHEDULED,
        lambda http, number: streamed(http, f"scheduler-{number}", 150),
        partial(kill_one, app, "scheduler"),
    )
    assert {(answer.status, answer.tokens, answer.ends, answer.errors) for answer in answers} == {
        (200, 150, 1, 0)
    }
    await asyncio.to_thread(
        wait_for, lambda: len(attempts_by_request(app, "scheduler-")) >= SCHEDULED, 10, "all log lines"
    )
    wait_for(lambda: app.metric("ewsjf_requests_in_flight") == 0, 10, "an empty ledger")
    assert attempts_by_request(app, "scheduler-") == {f"scheduler-{number}": 1 for number in range(SCHEDULED)}
    assert app.metric("ewsjf_requests_waiting") == 0


async def test_a_killed_replica_costs_whole_answers_nothing_and_ends_its_streams_with_an_error(
    app: Served,
) -> None:
    """Answers that are not streamed have no first byte until they are complete."""

    async def whole(http: httpx.AsyncClient, name: str) -> Answer:
        request = body(name, 300, stream=False)
        response = await http.post("/v1/chat/completions", json=request, headers={"x-request-id": name})
        tokens = response.json().get("usage", {}).get("completion_tokens", 0)
        return Answer(name, response.status_code, tokens, 1, 0)

    async def alternate(http: httpx.AsyncClient, number: int) -> Answer:
        if number % 2:
            return await whole(http, f"replica-{number}")
        return await streamed(http, f"midway-{number}", 800)

    answers = await under_load(app, 80, alternate, partial(kill_one, app, "short"))
    assert {(answer.status, answer.tokens) for answer in answers[1::2]} == {(200, 300)}
    # The log line of an answer follows its last byte.
    await asyncio.to_thread(
        wait_for, lambda: len(attempts_by_request(app, "replica-")) >= 40, 10, "all log lines"
    )
    attempts = attempts_by_request(app, "replica-")
    assert len(attempts) == 40
    # The killed replica held some of them, which were dispatched a second time.
    assert max(attempts.values()) == 2
    broken = [answer for answer in answers[::2] if answer.errors]
    assert broken
    # Never truncated silently: an answer is complete or ends with an error.
    assert {(answer.tokens, answer.ends) for answer in answers[::2] if not answer.errors} == {(800, 1)}
    assert {answer.errors for answer in broken} == {1}
    await asyncio.to_thread(wait_for, lambda: len(app.replicas("short")) == 2, 60, "a new replica")


async def test_requests_of_a_killed_gateway_are_released_within_two_seconds(app: Served) -> None:
    def is_back() -> bool:
        pids = {process.pid for process in app.replicas("gateway")}
        return len(pids) == 2 and dead.pid not in pids

    async with httpx.AsyncClient(base_url=app.url, timeout=60, limits=LIMITS) as http:
        streams = [asyncio.create_task(streamed(http, f"gateway-{n}", 1_700)) for n in range(20)]
        await asyncio.to_thread(
            wait_for, lambda: app.metric("ewsjf_requests_in_flight") == 20, 10, "20 streams"
        )
        dead = await asyncio.to_thread(kill_one, app, "gateway")
        killed_at = time.monotonic()
        # Streams of the dead gateway break at once, though a busy machine may notice late; the others
        # continue.
        await asyncio.wait(streams, timeout=2.0, return_when=asyncio.FIRST_COMPLETED)
        await asyncio.sleep(0.2)
        left = sum(not stream.done() for stream in streams)
        assert 0 < left < 20
        await asyncio.to_thread(
            wait_for, lambda: app.metric("ewsjf_requests_in_flight") <= left, 10, "released places"
        )
        # Two seconds, plus polling time on a busy machine.
        assert time.monotonic() - killed_at < 3.5
        ended = await asyncio.gather(*streams, return_exceptions=True)
    survivors = [answer for answer in ended if isinstance(answer, Answer)]
    assert {(answer.tokens, answer.ends) for answer in survivors} == {(1_700, 1)}
    assert all(isinstance(answer, Answer | httpx.TransportError) for answer in ended)
    await asyncio.to_thread(wait_for, is_back, 60, "a new gateway")
    async with httpx.AsyncClient(base_url=app.url, timeout=30) as http:
        answer = await streamed(http, "back-gateway", 10)
    assert (answer.status, answer.tokens, answer.ends) == (200, 10, 1)


async def test_connections_wait_while_all_gateways_are_replaced(app: Served) -> None:
    dead: list[psutil.Process] = []
    ended: list[tuple[bool, Answer | httpx.TransportError]] = []

    async def connect(number: int) -> None:
        began_after = bool(dead)
        try:
            async with httpx.AsyncClient(base_url=app.url, timeout=60) as http:
                ended.append((began_after, await streamed(http, f"new-{number}", 10)))
        except httpx.TransportError as error:
            ended.append((began_after, error))

    async with asyncio.TaskGroup() as clients:
        for number in range(160):
            clients.create_task(connect(number))
            await asyncio.sleep(0.05)
            if number == 40:
                dead = await asyncio.to_thread(lambda: [kill_one(app, "gateway") for _ in range(2)])
    assert [error for _, error in ended if isinstance(error, httpx.ConnectError)] == []
    assert {
        (answer.status, answer.tokens, answer.ends) if isinstance(answer, Answer) else repr(answer)
        for began_after, answer in ended
        if began_after
    } == {(200, 10, 1)}
    await asyncio.to_thread(wait_for, lambda: len(app.replicas("gateway")) == 2, 60, "two new gateways")


def is_replaced(app: Served, deployment: str, victim: psutil.Process, replicas: int) -> bool:
    """Return whether the victim has ended, and the deployment has all its replicas without it."""
    pids = {process.pid for process in app.replicas(deployment)}
    return victim.pid not in pids and len(pids) == replicas


async def test_a_halted_scheduler_is_replaced_in_seconds(app: Served) -> None:
    victim: psutil.Process = app.replicas("scheduler")[0]
    began = time.monotonic()
    answers = await under_load(
        app,
        100,
        lambda http, number: streamed(http, f"halted-{number}", 20),
        lambda: victim.send_signal(signal.SIGSTOP),
    )
    # Halted after one second, and replaced within three; a busy machine takes longer to start a process.
    # Three health checks would take ten seconds before that.
    assert time.monotonic() - began < 8
    assert not victim.is_running()
    assert {(answer.status, answer.tokens, answer.ends, answer.errors) for answer in answers} == {
        (200, 20, 1, 0)
    }


@pytest.mark.parametrize("deployment", ["gateway", "short"])
async def test_a_halted_process_is_replaced_within_ten_seconds(app: Served, deployment: str) -> None:
    victim: psutil.Process = app.replicas(deployment)[0]
    victim.send_signal(signal.SIGSTOP)
    # Three health checks would take half a minute for a gateway, and a minute and a half for a replica.
    await asyncio.to_thread(
        wait_for, lambda: is_replaced(app, deployment, victim, 2), 10, f"another {deployment}"
    )
    async with httpx.AsyncClient(base_url=app.url, timeout=30, limits=LIMITS) as http:
        answers = await asyncio.gather(
            *(streamed(http, f"after-halt-{deployment}-{number}", 10) for number in range(20))
        )
    assert {(answer.status, answer.tokens, answer.ends) for answer in answers} == {(200, 10, 1)}
