"""Engines whose words name their request, so that every word of every answer can be audited."""

import asyncio
import json
import time
from collections import Counter
from collections.abc import Sequence
from typing import Any

from experiments.common.audit import Ended, asked
from serve_app.engines.engine import Scope, Send
from tests.serving.gateway.builders import MODEL, Engine, send_event, start_stream, usage_json
from tests.serving.gateway.fleet import Fleet


class MarkedEngine(Engine):
    """Answers `NAME.0 NAME.1 ...` to a prompt that begins with `NAME:`."""

    async def _stream(self, scope: Scope, parsed: dict[str, Any], send: Send) -> None:
        await start_stream(send)
        chunk = {"id": "x", "object": "chat.completion.chunk", "created": 1, "model": parsed["model"]}
        name, count = name_of(parsed), parsed["max_tokens"]
        for number in range(count):
            choice = {"index": 0, "delta": {"content": f"{name}.{number} "}, "finish_reason": None}
            await send_event(send, {**chunk, "choices": [choice]})
            await asyncio.sleep(self.token_delay_s)
        await send_event(send, {**chunk, "choices": [], "usage": usage_json(7, count)})
        await send({"type": "http.response.body", "body": b"data: [DONE]\n\n", "more_body": False})


def name_of(parsed: dict[str, Any]) -> str:
    """Return the request's name from its prompt."""
    name: str = parsed["messages"][0]["content"].partition(":")[0]
    return name


def computed(engines: Sequence[Engine]) -> Counter[str]:
    """Count how often engines received each request."""
    return Counter(name_of(json.loads(body)) for engine in engines for body in engine.bodies)


async def answers(fleet: Fleet, count: int, over_s: float, tokens: int = 10, label: str = "r") -> list[Ended]:
    """Send this many requests, evenly spaced, and audit each."""

    async def one(number: int) -> Ended:
        await asyncio.sleep(number * over_s / count)
        name, wanted, began = f"{label}{number}", tokens + number % 7, time.monotonic()
        text = "".join(f"{name}.{place} " for place in range(wanted))
        end, detail = await asked(fleet.http, name, wanted, model=MODEL, text=text)
        return Ended(name, end, began, time.monotonic(), detail)

    return list(await asyncio.gather(*(one(number) for number in range(count))))


def ends_of(ended: Sequence[Ended]) -> Counter[str]:
    """Count the requests by kind of end."""
    return Counter(one.end for one in ended)
