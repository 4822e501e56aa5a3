"""One streamed request as its client sees it, and the account of many."""

import json
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import httpx

ENDS = (
    "answered",
    "refused with a reason",
    "ended with an error event",
    "connection broken before an answer",
    "cut without an error event",
    "swapped or of a wrong length",
    "lost",
)
"""How a request may end; the last three must not happen while the gateway of a request lives."""


@dataclass(frozen=True, slots=True)
class Ended:
    """One request.

    Attributes:
        end: one of `ENDS`.
        detail: status or error, for whoever looks for the reason.
    """

    name: str
    end: str
    started_s: float
    ended_s: float
    detail: str = ""


def body_of(name: str, tokens: int) -> dict[str, Any]:
    """Asks for so many tokens, by which the answer is known."""
    return {
        "model": "demo",
        "messages": [{"role": "user", "content": f"{name}: tell me something."}],
        "max_tokens": tokens,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }


async def asked(http: httpx.AsyncClient, name: str, tokens: int) -> tuple[str, str]:
    """Send one request; its end and the detail."""
    told = ended = failed = 0
    begun = False
    try:
        async with http.stream(
            "POST", "/v1/chat/completions", json=body_of(name, tokens), headers={"x-request-id": name}
        ) as response:
            if response.status_code != 200:
                return _refusal(response.status_code, await response.aread())
            begun = True
            swapped = response.headers.get("x-request-id") != name
            async for line in response.aiter_lines():
                if line == "data: [DONE]":
                    ended += 1
                elif line.startswith("data: "):
                    event = json.loads(line.removeprefix("data: "))
                    failed += "error" in event
                    told += (event.get("usage") or {}).get("completion_tokens", 0)
    except httpx.TimeoutException as exc:
        return "lost", repr(exc)
    except (httpx.TransportError, json.JSONDecodeError) as exc:
        return (ENDS[4] if begun else ENDS[3]), repr(exc)
    if failed:
        return ENDS[2], ""
    if ended != 1:
        return ENDS[4], f"{ended} ends"
    return (ENDS[5], f"{told} tokens of {tokens}") if swapped or told != tokens else (ENDS[0], "")


def account(ended: Iterable[Ended]) -> dict[str, int]:
    """How many ended in each way."""
    found = Counter(one.end for one in ended)
    return {end: found[end] for end in ENDS}


def _refusal(status: int, content: bytes) -> tuple[str, str]:
    """A refusal has a reason that a client can read; what HAProxy says by itself has none."""
    try:
        message = json.loads(content)["error"]["message"]
    except (ValueError, KeyError, TypeError):
        return ENDS[3], f"{status} without a reason"
    return ENDS[1], f"{status}: {message}"
