"""Steady streamed requests from the clients' view, and an audit of their ends."""

import asyncio
import json
import re
import time
from collections import Counter
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import httpx

ENDS = (
    "answered",
    "rejected with a reason",
    "ended with an error event",
    "connection broken before an answer",
    "connection broken in mid-answer",
    "cut without a sign",
    "swapped or of a wrong length",
    "lost",
)
"""Possible ends of a request; the last three must never occur. Connections break with their gateway."""


SUMMARY = (
    *("requests", "answered once", "rejected with a reason", "ended with an error event"),
    *("connection broken", "lost, doubled, cut without a sign, or swapped"),
)
"""Headings of a short audit; see `summary`."""


@dataclass(frozen=True, slots=True)
class Ended:
    """One request.

    Attributes:
        end: one of `ENDS`.
        detail: status or error, to find the cause.
    """

    name: str
    end: str
    started_s: float
    ended_s: float
    detail: str = ""


def body_of(name: str, tokens: int, model: str = "demo") -> dict[str, Any]:
    """Return a request for exactly this many tokens, which identify its answer."""
    return {
        "model": model,
        "messages": [{"role": "user", "content": f"{name}: tell me something."}],
        "max_tokens": tokens,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }


@dataclass(slots=True)
class ReceivedStream:
    """The received part of an answer."""

    text: str = ""
    tokens: int = 0
    ends: int = 0
    errors: int = 0

    def take(self, line: str) -> None:
        """Add a line of the stream."""
        if line == "data: [DONE]":
            self.ends += 1
        elif line.startswith("data: "):
            event = json.loads(line.removeprefix("data: "))
            self.errors += "error" in event
            self.tokens += (event.get("usage") or {}).get("completion_tokens", 0)
            self.text += "".join(choice["delta"].get("content") or "" for choice in event.get("choices", ()))

    def end(self, tokens: int, text: str | None) -> tuple[str, str]:
        """Return end and detail of a complete stream; see `asked`."""
        if self.errors:
            return ENDS[2], ""
        if self.ends != 1:
            return ENDS[5], f"{self.ends} ends"
        if self.tokens != tokens or text not in {None, self.text}:
            return ENDS[6], f"{self.tokens} tokens of {tokens}: {self.text[:100]}"
        return ENDS[0], ""


async def asked(
    http: httpx.AsyncClient,
    name: str,
    tokens: int,
    *,
    model: str = "demo",
    text: str | None = None,
    headers: Mapping[str, str] = MappingProxyType({}),
) -> tuple[str, str]:
    """Send one request; return its end and the detail.

    Args:
        text: expected text of the whole answer, for engines with predictable text.
        headers: besides the request's ID.
    """
    received, begun = ReceivedStream(), False
    try:
        async with http.stream(
            "POST",
            "/v1/chat/completions",
            json=body_of(name, tokens, model),
            headers={"x-request-id": name, **headers},
        ) as response:
            if response.status_code != 200:
                return _rejection(response.status_code, await response.aread())
            begun = True
            swapped = response.headers.get("x-request-id") != name
            async for line in response.aiter_lines():
                received.take(line)
    except httpx.TimeoutException as exc:
        return "lost", repr(exc)
    except (httpx.TransportError, json.JSONDecodeError) as exc:
        return (ENDS[4] if begun else ENDS[3]), repr(exc)
    if swapped:
        return ENDS[6], "another request's id"
    return received.end(tokens, text)


NO_LIMIT = httpx.Limits(max_connections=None)
"""No connection limit: a client with a steady rate has any number of open answers."""


@dataclass(slots=True)
class SteadyTraffic:
    """Requests at a steady rate; neighbours differ in length, which reveals swapped answers.

    Args:
        label: prefix of the requests' names.
        client: returns the HTTP client for the next request.
        lengths: number of different lengths; the shortest is 20 tokens.
        headers: returns the current request headers.

    Attributes:
        late_s: delay of each request behind its scheduled time.
    """

    label: str
    rate_per_s: float
    client: Callable[[], httpx.AsyncClient]
    lengths: int
    headers: Callable[[], Mapping[str, str]] = dict
    ended: list[Ended] = field(default_factory=list)
    late_s: list[float] = field(default_factory=list)
    began: float = field(default_factory=time.monotonic)

    async def run_beside(self, work: Coroutine[Any, Any, None]) -> None:
        """Send requests until the work is done, then wait for open ones."""
        working = asyncio.create_task(work)
        sent: set[asyncio.Task[None]] = set()
        number = 0
        while not working.done():
            planned_at = self.began + number / self.rate_per_s
            await asyncio.sleep(max(0.0, planned_at - time.monotonic()))
            self.late_s.append(time.monotonic() - planned_at)
            task = asyncio.create_task(self._one(number))
            sent.add(task)
            task.add_done_callback(sent.discard)
            number += 1
        await working
        await asyncio.gather(*sent)

    async def request(self, name: str, tokens: int) -> Ended:
        """Send one request beside the steady ones, and wait for its end."""
        started_s = time.monotonic()
        end, detail = await asked(self.client(), name, tokens, headers=self.headers())
        return Ended(name, end, started_s, time.monotonic(), detail)

    async def _one(self, number: int) -> None:
        self.ended.append(await self.request(f"{self.label}-{number}", 20 + number % self.lengths))


def ends_of(ended: Sequence[Ended], log: Iterable[str], prefix: str) -> dict[str, Any]:
    """Return the ends of requests and the messages that clients received.

    Args:
        log: log lines of all gateways.
        prefix: prefix of the requests' names.
    """
    details = Counter(f"{one.end}: {one.detail}" for one in ended if one.detail)
    return {
        "sent": len(ended),
        "ends": account(ended),
        "answered_twice": answered_twice(log, prefix),
        "details": dict(details.most_common(10)),
    }


def answered_twice(lines: Iterable[str], prefix: str) -> int:
    """Count the requests that gateways logged as completed more than once, by the prefix of their names."""
    completed = (
        re.search(r"event=concluded outcome=completed .* client_request_id=(\S+)", line) for line in lines
    )
    counts = Counter(found[1] for found in completed if found and found[1].startswith(prefix))
    return sum(count > 1 for count in counts.values())


def account(ended: Iterable[Ended]) -> dict[str, int]:
    """Count the requests by kind of end."""
    found = Counter(one.end for one in ended)
    return {end: found[end] for end in ENDS}


def summary(figures: Mapping[str, Any]) -> list[str]:
    """Return the cells under `SUMMARY` for a row with `sent`, `ends` and `answered_twice`."""
    ends = figures["ends"]
    answered, rejected, error_event, before, midway, *never = (ends[end] for end in ENDS)
    counts = (
        figures["sent"],
        answered,
        rejected,
        error_event,
        before + midway,
        sum(never) + figures["answered_twice"],
    )
    return [f"{count:,}" for count in counts]


def _rejection(status: int, content: bytes) -> tuple[str, str]:
    """Return the end of a rejection, which must have a readable reason."""
    try:
        message = json.loads(content)["error"]["message"]
    except (ValueError, KeyError, TypeError):
        return ENDS[3], f"{status} without a reason"
    return ENDS[1], f"{status}: {message}"
