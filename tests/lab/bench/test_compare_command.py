"""`bench --compare` end to end: two servers with known latencies."""

import asyncio
import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from serve_app.cli import main
from tests.lab.bench.scripted import Script, document, scripted, stream_of, streaming

SLICES, MEMBERS, SLICE_S = 6, 4, 0.1
MODELS = document(200, {"data": [{"id": "m"}]})


def delayed(delay_s: float) -> Script:
    answer = streaming(stream_of(20, 3))

    async def late(writer: asyncio.StreamWriter) -> None:
        await asyncio.sleep(delay_s)
        await answer(writer)

    return late


@contextmanager
def servers(*answers: Callable[[int], Script]) -> Iterator[list[str]]:
    """Run servers that answer the requests of the n-th slice in this way."""
    ready, ended = threading.Event(), threading.Event()
    urls: list[str] = []

    async def serve() -> None:
        async with asyncio.TaskGroup() as group:
            for each in answers:
                group.create_task(one(each))

    async def one(answer: Callable[[int], Script]) -> None:
        scripts = [answer(number) for number in range(SLICES) for _ in range(MEMBERS)]
        async with scripted(*scripts) as server:
            server.get = MODELS
            urls.append(f"http://127.0.0.1:{server.port}")
            if len(urls) == len(answers):
                ready.set()
            await asyncio.to_thread(ended.wait)

    thread = threading.Thread(target=asyncio.run, args=(serve(),))
    thread.start()
    try:
        assert ready.wait(60)
        yield urls
    finally:
        ended.set()
        thread.join()


@pytest.fixture
def trace(tmp_path: Path) -> str:
    path = tmp_path / "trace.csv"
    # All requests of a slice arrive soon after its start.
    arrivals_s = [number * SLICE_S + 0.01 * (number > 0) for number in range(SLICES) for _ in range(MEMBERS)]
    rows = [f"{arrival_s},20,3" for arrival_s in arrivals_s]
    path.write_text("\n".join(("arrival_s,prompt_tokens,output_tokens", *rows)))
    return str(path)


def compared(urls: list[str], trace: str, tmp_path: Path, *more: str) -> dict[str, Any]:
    out = tmp_path / "out.json"
    words = ("--url", urls[0], "--compare", urls[1], "--trace", trace, "--slice-s", str(SLICE_S), *more)
    assert main(["bench", *words, "--json", str(out)]) == 0
    found: dict[str, Any] = json.loads(out.read_text())
    return found


def test_the_interval_holds_the_difference_of_two_servers(
    trace: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    # The second server is slower by 60 ms on average, alternately by 40 and 80.
    with servers(lambda _: delayed(0.02), lambda number: delayed(0.06 + 0.04 * (number % 2))) as urls:
        found = compared(urls, trace, tmp_path)
    ttft = found["comparison"]["latencies"]["ttft_s"]["mean"]
    # Whether the interval excludes zero depends on the machine's load: see `test_comparison`.
    assert ttft["low"] <= 0.06 <= ttft["high"]
    assert ttft["n"] == SLICES * MEMBERS
    assert found["comparison"]["errors"] == {
        **dict.fromkeys(("base", "other", "difference", "low", "high"), 0.0),
        "n": SLICES * MEMBERS,
        "is_clear": False,
    }
    assert found["endpoints"]["B"] == {"url": urls[1], "outcomes": {"completed": SLICES * MEMBERS}}
    printed = capsys.readouterr().out
    assert f"A {urls[0]}" in printed
    assert "| mean TTFT, ms" in printed
    assert "24 requests to each in 6 alternating slices" in printed


def test_the_interval_of_equal_servers_holds_zero(trace: str, tmp_path: Path) -> None:
    # Each is slower in every other slice.
    with servers(
        lambda number: delayed(0.02 + 0.04 * (number % 2)), lambda number: delayed(0.06 - 0.04 * (number % 2))
    ) as urls:
        found = compared(urls, trace, tmp_path)
    for name in ("ttft_s", "e2e_s"):
        mean = found["comparison"]["latencies"][name]["mean"]
        assert mean["low"] <= 0 <= mean["high"]
        assert not mean["is_clear"]


def test_a_rejection_counts_as_an_error_of_its_endpoint(trace: str, tmp_path: Path) -> None:
    full = document(429, {"error": {"message": "full", "code": "queue_full"}})
    with servers(lambda _: delayed(0.0), lambda number: full if number % 2 else delayed(0.0)) as urls:
        found = compared(urls, trace, tmp_path, "--records", str(tmp_path / "records.jsonl"))
    comparison = found["comparison"]
    assert (comparison["errors"]["base"], comparison["errors"]["other"]) == (0.0, 0.5)
    assert comparison["completed_by_both"] == SLICES * MEMBERS / 2
    assert found["endpoints"]["B"]["outcomes"] == {"completed": 12, "rejected_queue_full": 12}
    ids = [json.loads(line)["request_id"] for line in (tmp_path / "records.jsonl").read_text().splitlines()]
    assert ids == [f"bench-{number}" for number in range(2 * SLICES * MEMBERS)]
