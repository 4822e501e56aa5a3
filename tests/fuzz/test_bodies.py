"""Thousands of malformed bodies over HTTP: every answer is readable, and none is a server error."""

import asyncio
import itertools
from collections import Counter
from collections.abc import Iterator

import httpx
import pytest

from tests.fuzz.mutations import malformed
from tests.fuzz.threaded_gateway import gateway_in_a_thread

_AT_ONCE = 16


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with gateway_in_a_thread() as address:
        yield address


@pytest.mark.parametrize("count", [1_000, pytest.param(10_000, marks=pytest.mark.slow)])
async def test_malformed_bodies_are_rejected_in_openais_shape_and_never_by_a_fault(
    url: str, count: int
) -> None:
    bodies = itertools.islice(malformed(seed=count), count)
    statuses: Counter[int] = Counter()
    faults: list[tuple[int, str, bytes, bytes]] = []
    async with httpx.AsyncClient(base_url=url, timeout=30) as http:

        async def send() -> None:
            for path, body in bodies:
                answer = await http.post(path, content=body, headers={"content-type": "application/json"})
                statuses[answer.status_code] += 1
                if answer.status_code >= 500 or not _readable(answer):
                    faults.append((answer.status_code, path, body[:300], answer.content[:300]))

        await asyncio.gather(*(send() for _ in range(_AT_ONCE)))
        assert (await http.get("/health")).status_code == 200
    assert faults == []
    assert sum(statuses.values()) == count
    # Both kinds must occur: some mutations leave a body valid.
    assert statuses[400] > count / 3
    assert statuses[200] > count / 20


def _readable(answer: httpx.Response) -> bool:
    """Return whether a client can find out what happened."""
    if answer.status_code == 200:
        return bool(answer.content)
    message = answer.json()["error"]["message"]
    return isinstance(message, str) and message != ""
