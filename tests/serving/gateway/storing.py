"""Engine for tests that stores responses and computes them in the background, as vLLM with its store does."""

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import parse_qs
from uuid import uuid4

from serve_app.engines.engine import Receive, Scope, Send, read_body

from .builders import Engine, error_json, reply_json, send_event, start_stream

_PATH = "/v1/responses"
_CANCEL = "/cancel"


@dataclass(eq=False)
class _Response:
    """A response and the conversation that it ends.

    Attributes:
        document: the response in its current state.
        events: events of a background stream so far; None if it has none.
        changed: set when there are more events, or when the response has ended.
    """

    conversation: list[str]
    document: dict[str, Any]
    events: list[dict[str, Any]] | None = None
    changed: asyncio.Event = field(default_factory=asyncio.Event)
    task: asyncio.Task[None] | None = None

    @property
    def is_running(self) -> bool:
        return self.document["status"] in ("queued", "in_progress")


class StoringEngine(Engine):
    """Scripted engine that stores responses. They consist of numbered words and have the requested length.

    `bodies` and `running` count the requests that generate, as the guard of a replica does.
    """

    names_responses = True

    def __init__(self, *, token_delay_s: float = 0.005) -> None:
        super().__init__(token_delay_s=token_delay_s)
        self._stored: dict[str, _Response] = {}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["path"].startswith(_PATH + "/"):
            await read_body(receive)
            await self._serve_stored(scope, send)
        else:
            await super().__call__(scope, receive, send)

    async def _respond(self, parsed: dict[str, Any], send: Send) -> None:
        previous = parsed.get("previous_response_id")
        if parsed.get("background") and not parsed.get("store", True):
            error = error_json("background can only be used when `store` is true", param="background")
            await reply_json(send, 400, error)
        elif previous is not None and previous not in self._stored:
            await _reply_not_found(previous, send)
        else:
            before = [] if previous is None else self._stored[previous].conversation
            await self._create(_Response([*before, parsed["input"]], _document(parsed)), parsed, send)

    async def _create(self, response: _Response, parsed: dict[str, Any], send: Send) -> None:
        count, streams = parsed["max_output_tokens"], parsed.get("stream")
        if parsed.get("background"):
            self._store(response)
            response.events = [] if streams else None
            self.running += 1
            response.task = asyncio.create_task(self._work(response, count))
            response.task.add_done_callback(lambda _: self._end(response))
            if streams:
                await _replay(response, send, 0)
            else:
                await reply_json(send, 200, response.document)
            return
        if streams:
            await start_stream(send)
        async for event in self._events(response, count):
            # Stored before the client has the whole response.
            if not response.is_running and parsed.get("store", True):
                self._store(response)
            if streams:
                await send_event(send, event, name=event["type"])
        if streams:
            await send({"type": "http.response.body", "body": b"", "more_body": False})
        else:
            await reply_json(send, 200, response.document)

    def _store(self, response: _Response) -> None:
        self._stored[response.document["id"]] = response

    async def _work(self, response: _Response, count: int) -> None:
        async for event in self._events(response, count):
            if response.events is not None:
                response.events.append(event)
            response.changed.set()

    def _end(self, response: _Response) -> None:
        self.running -= 1
        response.changed.set()

    async def _events(self, response: _Response, count: int) -> AsyncIterator[dict[str, Any]]:
        """Yield the events of a response while it is computed, and complete it before the last one."""
        running = {**response.document, "status": "in_progress"}
        yield {"type": "response.created", "sequence_number": 0, "response": running}
        yield {"type": "response.in_progress", "sequence_number": 1, "response": running}
        delta = {"type": "response.output_text.delta", "item_id": "m", "output_index": 0, "content_index": 0}
        for number in range(count):
            await asyncio.sleep(self.token_delay_s)
            yield {**delta, "sequence_number": number + 2, "delta": f"w{number} ", "logprobs": []}
        response.document |= _answer(response.conversation, count)
        response.conversation.append(response.document["output"][0]["content"][0]["text"])
        yield {"type": "response.completed", "sequence_number": count + 2, "response": response.document}

    async def _serve_stored(self, scope: Scope, send: Send) -> None:
        response_id = scope["path"].removeprefix(_PATH + "/").removesuffix(_CANCEL)
        query = parse_qs(scope["query_string"].decode())
        response = self._stored.get(response_id)
        if response is None:
            await _reply_not_found(response_id, send)
        elif scope["path"].endswith(_CANCEL):
            await _cancel(response, send)
        elif query.get("stream") != ["true"]:
            await reply_json(send, 200, response.document)
        elif response.events is None:
            await reply_json(send, 400, error_json(f"Unknown response_id: {response_id}"))
        else:
            await _replay(response, send, int(query.get("starting_after", ["-1"])[0]) + 1)


def _document(parsed: dict[str, Any]) -> dict[str, Any]:
    """Return the response before anything is computed."""
    return {
        "id": parsed.get("request_id") or f"resp_{uuid4().hex}",
        "object": "response",
        "created_at": 1,
        "model": parsed["model"],
        "status": "queued",
        "output": [],
        "parallel_tool_calls": False,
        "tool_choice": "auto",
        "tools": [],
        "error": None,
        "usage": None,
    }


def _answer(conversation: list[str], count: int) -> dict[str, Any]:
    """Return the fields of a complete response. A prompt has one token per word."""
    text = " ".join(f"w{number}" for number in range(count))
    content = [{"type": "output_text", "text": text, "annotations": []}]
    message = {"type": "message", "id": "m", "role": "assistant", "status": "completed", "content": content}
    prompt = sum(len(part.split()) for part in conversation)
    usage = {
        "input_tokens": prompt,
        "output_tokens": count,
        "total_tokens": prompt + count,
        "input_tokens_details": {"cached_tokens": 0},
        "output_tokens_details": {"reasoning_tokens": 0},
    }
    return {"status": "incomplete", "output": [message], "usage": usage}


async def _replay(response: _Response, send: Send, first: int) -> None:
    """Send the events of a background stream from number `first` on, including future ones."""
    assert response.events is not None, "it is a stream"
    await start_stream(send)
    while True:
        response.changed.clear()
        is_last = not response.is_running
        for event in response.events[first:]:
            await send_event(send, event, name=event["type"])
            first += 1
        if is_last:
            break
        await response.changed.wait()
    await send({"type": "http.response.body", "body": b"", "more_body": False})


async def _cancel(response: _Response, send: Send) -> None:
    if not response.is_running or response.task is None:
        error = error_json("Cannot cancel a synchronous response.", param="response_id")
        await reply_json(send, 400, error)
        return
    response.document["status"] = "cancelled"
    response.task.cancel()
    await reply_json(send, 200, response.document)


async def _reply_not_found(response_id: str, send: Send) -> None:
    error = error_json(f"Response with id '{response_id}' not found.", 404, "response_id")
    await reply_json(send, 404, error)
