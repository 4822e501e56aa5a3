"""One tour of a served application: an overload, a new scheduler, and the commands of its operator."""

import asyncio
import itertools
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from serve_app.cli import main
from serve_app.lab.workloads import load_trace
from tests.e2e.served import Served, start_tuner, wait_for

# The first test of a session waits until the application has started.
pytestmark = pytest.mark.timeout(300)

# Batch work that alone fills the engines, then a flood of a more urgent class, and streams behind both. They
# wait for seconds, because queue updates come at most once per second.
BATCH, BATCH_TOKENS = 70, 1_000
FLOOD, FLOOD_TOKENS = 140, 300
STREAMS, STREAM_TOKENS = 40, 100
# Requests on the two replicas of the short pool that batch work reaches only where no others run.
ALONE = 24
RECEIPT, UPDATES = {"x-ewsjf-receipt": "1"}, {"x-ewsjf-queue": "comments"}


class Client:
    """Client of an overloaded application."""

    def __init__(self, http: httpx.AsyncClient) -> None:
        self.http, self.sent = http, 0

    async def send(
        self, tenant: str, priority: str, tokens: int, wants: dict[str, str], *, stream: bool = False
    ) -> httpx.Response:
        """Send a request with a unique ID, and return its answer; `wants` are further headers."""
        self.sent += 1
        named = {"x-tenant": tenant, "x-priority": priority, "x-request-id": f"tour-{self.sent}"}
        body: dict[str, Any] = {
            "model": "demo",
            "messages": [{"role": "user", "content": f"{self.sent}: " + "word " * (5 + self.sent % 3 * 40)}],
            "max_tokens": tokens,
            "ignore_eos": True,
        }
        if stream:
            body |= {"stream": True, "stream_options": {"include_usage": True}}
        return await self.http.post("/v1/chat/completions", headers={**named, **wants}, json=body)

    def start(self, count: int, *args: Any, **options: Any) -> "list[asyncio.Task[httpx.Response]]":
        """Send this many requests in the background."""
        return [asyncio.create_task(self.send(*args, **options)) for _ in range(count)]


async def test_an_overload_is_served_by_class_and_tenant_and_every_wait_is_explained(
    app: Served, tmp_path: Path
) -> None:
    def metric(name: str, **labels: str) -> float:
        return app.metric(name, model="demo", **labels)

    def ends_of_all() -> list[float]:
        # Each gateway shows the counts of both.
        return [metric(f"ewsjf_{name}_total") for name in ("requests_concluded", "gateway_requests")]

    def revoked() -> float:
        return metric("ewsjf_gateway_put_backs_total", failure="revoked")

    admin = app.application.admin_headers()
    revoked_before, ended_before = revoked(), ends_of_all()
    estimated_before = metric("ewsjf_queue_estimates_total", estimate="first")
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=app.url, timeout=200, limits=limits) as http:
        client = Client(http)
        batch = client.start(BATCH, "nightly", "batch", BATCH_TOKENS, RECEIPT)
        # Earlier requests of other classes limit batch work for seconds.
        await asyncio.to_thread(
            wait_for, lambda: metric("ewsjf_requests_in_flight", pool="short") >= ALONE, 60, "batch work"
        )
        flood = [
            *client.start(FLOOD // 2, "flood", "interactive", FLOOD_TOKENS, RECEIPT),
            *client.start(FLOOD // 2, "tide", "interactive", FLOOD_TOKENS, RECEIPT, stream=True),
        ]
        streams = client.start(STREAMS, "reader", "batch", STREAM_TOKENS, UPDATES, stream=True)
        await asyncio.sleep(1.0)
        late = client.start(2, "late", "interactive", FLOOD_TOKENS, RECEIPT)
        (queue,) = (await http.get("/debug/queue", headers=admin)).json()["models"]
        answers = await asyncio.gather(*batch, *flood, *late)
        read = await asyncio.gather(*streams)
        named = [answer.headers["x-request-id"] for answer in answers]
        receipts = [(await http.get(f"/debug/requests/{name}", headers=admin)).json() for name in named]
        capture = await http.get("/debug/capture", headers=admin)
        (costs,) = (await http.get("/debug/costs", headers=admin)).json()["models"]

    assert {answer.status_code for answer in (*answers, *read)} == {200}
    assert {answer.json()["usage"]["completion_tokens"] for answer in answers[:BATCH]} == {BATCH_TOKENS}
    # Some batch work gave way, and its answers are complete all the same.
    assert revoked() > revoked_before
    # Each request concludes once, in the scheduler and in a gateway.
    wait_for(lambda: ends_of_all() == [count + client.sent for count in ended_before], 10, "the end of all")
    assert metric("ewsjf_requests_in_flight") == metric("ewsjf_requests_waiting") == 0

    assert all(each["reason"] for each in queue["sub_queues"] if each["tenant"] == "flood")
    # Only requests that were already dispatched are served before the late ones, and most of the flood after.
    waits = sorted(float(answer.headers["x-queue-wait-ms"]) for answer in answers[BATCH : BATCH + FLOOD])
    assert max(float(answer.headers["x-queue-wait-ms"]) for answer in answers[-2:]) < waits[-FLOOD // 4]

    for answer, receipt in zip(answers, receipts, strict=True):
        assert_consistent(answer, receipt)
    causes = {each["cause"] for receipt in receipts for each in receipt["queue"]["causes"]}
    assert causes >= {"engines_busy", "higher_class", "other_tenants", "own_requests"}
    assert "before_scheduler" not in causes
    assert {row["tenant"] for row in costs["rows"]} >= {"nightly", "flood", "tide", "reader", "late"}
    # Three replicas; every engine second with requests is charged to a tenant.
    assert 1 < sum(row["engine_seconds"] for row in costs["rows"]) <= 3 * costs["counted_s"]
    assert sum(row["imposed_delay_seconds"] for row in costs["rows"]) > 0

    for answer in read:
        assert_updates_end_with_the_start(answer.text)
    positions = [[int(found) for found in re.findall(r"position=(\d+)", answer.text)] for answer in read]
    assert sum(map(bool, positions)) >= STREAMS / 2
    assert metric("ewsjf_queue_estimates_total", estimate="first") > estimated_before
    assert all(1 <= position <= client.sent for of_stream in positions for position in of_stream)
    # The position of a single stream may rise: a shorter prompt that arrives later may go first.
    moved = [of_stream for of_stream in positions if len(of_stream) >= 2]
    assert sum(of_stream[-1] for of_stream in moved) < sum(of_stream[0] for of_stream in moved)

    captured = tmp_path / "captured.jsonl"
    captured.write_bytes(capture.content)
    trace = load_trace(captured)
    assert len(trace.requests) >= len(answers) + len(read)
    assert {request.priority.value for request in trace.requests} >= {"interactive", "batch"}
    assert "nightly" not in capture.text
    assert "word" not in capture.text


def assert_consistent(answer: httpx.Response, receipt: dict[str, Any]) -> None:
    """Assert that a receipt is consistent and agrees with its answer."""
    queue, summary = receipt["queue"], json.loads(answer.headers["x-ewsjf-receipt"])
    wait_ms = queue["ms"]
    assert receipt["outcome"] == "completed"
    assert wait_ms == pytest.approx(float(answer.headers["x-queue-wait-ms"]), abs=0.1)
    assert wait_ms == pytest.approx(summary["wait_ms"], abs=0.01)
    for causes_ms in ([each["ms"] for each in queue["causes"]], summary["causes_ms"].values()):
        # The shortest waits have no causes.
        assert sum(causes_ms) == pytest.approx(wait_ms, abs=0.01 if queue["causes"] else 1)
    assert all(each["ms"] > 0 and each["meaning"] for each in queue["causes"])
    stages = {each["stage"]: each["ms"] for each in receipt["stages"]}
    assert stages["queue"] == wait_ms
    # Gateway and scheduler share the machine's clock; figures are rounded.
    assert min(stages.values()) > -0.01, receipt
    assert receipt["attempts"][-1]["pool"] == answer.headers["x-pool"]
    assert receipt["tokens"]["output"] > 0


def assert_updates_end_with_the_start(text: str) -> None:
    """Assert that a stream has its updates before its answer, and the whole answer once."""
    comments, _, answer = text.partition("data: ")
    states = re.findall(r": queue state=(\w+)", comments)
    assert set(states) <= {"waiting", "started"}
    assert not states or states[-1] == "started"
    assert ": queue" not in answer
    assert answer.count("data: [DONE]") == 1
    assert f'"completion_tokens":{STREAM_TOKENS}' in answer.replace(" ", "")


def frames(answer: httpx.Response) -> Iterator[dict[str, Any]]:
    """Yield the state of the only model in each frame of a dashboard."""
    for line in answer.iter_lines():
        if line.startswith("data: "):
            (model,) = json.loads(line.removeprefix("data: "))["models"]
            yield model


def test_a_new_scheduler_gets_the_learned_queues_and_the_dashboard_continues(app: Served) -> None:
    start_tuner(app)
    long = {"model": "demo", "prompt": [7] * 700, "max_tokens": 2}
    for _ in range(8):
        assert httpx.post(f"{app.url}/v1/completions", json=long, timeout=60).status_code == 200
    wait_for(lambda: app.metric("ewsjf_partition_changes_total", model="demo") >= 1, 60, "learned queues")
    assert [line for line in app.log_lines("scheduler") if "partition_changed" in line and "=learned" in line]

    page = httpx.get(f"{app.url}/dashboard", timeout=10)
    assert page.headers["content-security-policy"].startswith("default-src 'none'")
    assert httpx.get(f"{app.url}/dashboard/events", timeout=10).status_code == 401
    headers = app.application.admin_headers()
    with httpx.stream("GET", f"{app.url}/dashboard/events", headers=headers, timeout=60) as answer:
        shown = frames(answer)
        before = next(model for model in shown if "error" not in model)
        assert {pool["pool"]: pool["replicas"] for pool in before["pools"]} == {"short": 2, "long": 1}
        assert before["activity"]["last_minutes"]["default"]["outcomes"]["completed"] >= 1
        (scheduler,) = app.replicas("scheduler")
        scheduler.kill()
        # The new scheduler has all replicas again within seconds. No request arrives to learn from.
        for model in itertools.islice(shown, 90):
            is_new = "error" not in model and model["incarnation"] > before["incarnation"]
            if is_new and sum(pool["ready"] for pool in model["pools"]) == 3:
                break
        else:
            raise AssertionError("the dashboard shows no new scheduler")
    wait_for(
        lambda: app.metric("ewsjf_partition_changes_total", model="demo", reason="restored") == 1,
        60,
        "the queues at the new scheduler",
    )
    assert app.metric("ewsjf_length_queues", model="demo") >= 2


def test_one_command_shows_the_application_and_another_freezes_its_tuner(
    app: Served, capsys: pytest.CaptureFixture[str]
) -> None:
    def shown(*options: str) -> str:
        assert main(["status", "--url", app.url, *options]) == 0
        return capsys.readouterr().out

    start_tuner(app)
    wait_for(lambda: "tuner: on, idle" in shown(), 30, "the parameter tuner")
    assert {"demo", "short"} <= set(shown().split())
    assert shown("--freeze-tuner").startswith("demo: the tuner is frozen: ")
    assert "frozen by an admin" in shown()
    assert shown("--thaw-tuner").startswith("demo: the tuner ")
    wait_for(lambda: "tuner: on, idle" in shown(), 30, "the tuner to go on")
