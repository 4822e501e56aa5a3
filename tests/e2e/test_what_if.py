"""What-if advice for a request of a served application, verified by applying it."""

import asyncio
import random

import httpx
import pytest

from tests.e2e.served import Served

pytestmark = pytest.mark.timeout(200)

REQUESTS = 200
CLASSES = ("interactive", "default", "batch")


async def burst(app: Served, name: str, raised: int | None = None) -> list[float]:
    """Send the same burst each time; return the queue times in milliseconds.

    Args:
        raised: the request that is sent as interactive.
    """
    rng = random.Random(5)
    limits = httpx.Limits(max_connections=REQUESTS + 10)

    async def one(number: int) -> float:
        priority, words, length = rng.choice(CLASSES), rng.choice((5, 100, 600)), rng.choice((48, 160))
        answer = await http.post(
            "/v1/chat/completions",
            headers={
                "x-tenant": f"tenant-{number % 3}",
                "x-priority": "interactive" if number == raised else priority,
                "x-request-id": f"{name}-{number}",
            },
            json={
                "model": "demo",
                "messages": [{"role": "user", "content": "word " * words}],
                "max_tokens": length,
                "stream": True,
            },
        )
        assert answer.status_code == 200
        return float(answer.headers["x-queue-wait-ms"])

    async with httpx.AsyncClient(base_url=app.url, timeout=120, limits=limits) as http:
        return list(await asyncio.gather(*(one(number) for number in range(REQUESTS))))


async def test_a_higher_class_would_have_helped_and_does(app: Served) -> None:
    waits = await burst(app, "first")
    # The last one served has the lowest class.
    last = max(range(REQUESTS), key=lambda number: waits[number])
    async with httpx.AsyncClient(base_url=app.url, timeout=120) as http:
        admin = app.application.admin_headers()
        receipt = (await http.get(f"/debug/requests/first-{last}", headers=admin)).json()
        answer = await http.get(f"/debug/requests/first-{last}/what-if", headers=admin)
        recording = await http.get(f"/debug/requests/first-{last}/recording", headers=admin)

    assert answer.status_code == 200, answer.text
    result = answer.json()
    assert receipt["class"] == result["class"] == "batch"
    assert result["recorded"]["wait_ms"] == pytest.approx(waits[last], abs=1.0)
    assert result["replay"]["requests"] >= REQUESTS
    assert "word" not in recording.text
    assert "tenant-" not in recording.text
    (higher,) = [each for each in result["changes"] if each["value"] == "interactive"]
    assert higher["wait"]["low_ms"] <= higher["wait"]["ms"] <= higher["wait"]["high_ms"]
    assert higher["wait"]["ms"] < waits[last] / 2
    # Admins know the other tenants, though the recording does not contain them.
    (other,) = [each for each in result["changes"] if each["kind"] == "tenant"]
    assert other["value"] in {"tenant-0", "tenant-1", "tenant-2"} - {receipt["tenant"]}
    assert other["label"].endswith(f" of tenant {other['value']}")

    again = await burst(app, "second", raised=last)
    assert again[last] < waits[last] / 2
