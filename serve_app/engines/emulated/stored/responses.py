"""The endpoints of responses that are kept: create, go on from one, look at it, cancel it.

As in vLLM, a response is kept unless `store` is false, in the memory of this one engine; `background` answers
at once and works on; a stream of one in the background can be had again from any event; and none is deleted.
"""

import asyncio
import contextlib
import time
import uuid
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Any
from urllib.parse import parse_qs

import msgspec

from serve_app.engines.asgi import send_response
from serve_app.engines.emulated.answers.completions import encode
from serve_app.engines.emulated.errors import ApiError, invalid
from serve_app.engines.emulated.http import Call
from serve_app.engines.emulated.stored.store import Document, ResponseStore, StoredResponse
from serve_app.engines.engine import Message

RESPONSES_PATH = "/v1/responses"
_CANCEL = "/cancel"


class _Asked(msgspec.Struct):
    """What matters here of a request; the rest is checked where it is generated."""

    input: str | list[Document]
    model: str | None = None
    store: bool | None = True
    stream: bool | None = False
    background: bool | None = False
    previous_response_id: str | None = None
    request_id: str | None = None


_decoder = msgspec.json.Decoder(_Asked, strict=False)


class EmulatedResponses:
    """Responses over a store.

    Args:
        generate: answers a request for a response that refers to no other.
    """

    def __init__(self, generate: Callable[[Call], Awaitable[None]]) -> None:
        self._generate = generate
        self._store = ResponseStore()

    async def create(self, call: Call) -> None:
        """`POST /v1/responses`."""
        try:
            asked = _decoder.decode(call.body)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            # It says what is wrong.
            await self._generate(call)
            return
        if asked.background and asked.store is False:
            raise invalid("background can only be used when `store` is true", param="background")
        response_id = asked.request_id or f"resp_{uuid.uuid4().hex}"
        before = self._messages_before(asked)
        own = [{"role": "user", "content": asked.input}] if isinstance(asked.input, str) else asked.input
        conversation = [*before, *own]
        call = replace(call, body=_body(call.body, response_id, conversation if before else None))
        if asked.store is False:
            await self._generate(call)
            return
        response = StoredResponse(conversation, _queued(response_id, asked), bool(asked.stream))
        if asked.background:
            await self._in_background(response_id, response, call)
        else:
            await self._in_sight(response_id, response, call)

    async def serve(self, call: Call) -> None:
        """One that is kept: `GET /v1/responses/ID`, `POST /v1/responses/ID/cancel`."""
        rest = call.scope["path"].removeprefix(RESPONSES_PATH + "/")
        cancels = rest.endswith(_CANCEL)
        if call.scope["method"] != ("POST" if cancels else "GET"):
            raise ApiError(405, "Method Not Allowed", kind="Method Not Allowed")
        response = self._store.find(rest.removesuffix(_CANCEL))
        if cancels:
            await self._cancel(response, call)
            return
        query = parse_qs(call.scope.get("query_string", b"").decode("latin-1"))
        if query.get("stream", ["false"])[0].lower() != "true":
            await send_response(call.send, 200, encode(response.document()))
            return
        if response.task is None or not response.streams:
            raise invalid(f"Unknown response_id: {rest}", param="response_id", value=rest)
        await _replay(response, call, int(query.get("starting_after", ["-1"])[0]) + 1)

    def _messages_before(self, asked: _Asked) -> list[Document]:
        if asked.previous_response_id is None:
            return []
        return self._store.find(asked.previous_response_id).messages()

    async def _in_sight(self, response_id: str, response: StoredResponse, call: Call) -> None:
        status = 0

        async def send(message: Message) -> None:
            nonlocal status
            status = message.get("status", status)
            response.answer += message.get("body", b"")
            if message["type"] == "http.response.body" and not message.get("more_body", False):
                # Before its client can ask for it.
                response.end()
                if status == 200:
                    self._store.keep(response_id, response)
            await call.send(message)

        await self._generate(replace(call, send=send))

    async def _in_background(self, response_id: str, response: StoredResponse, call: Call) -> None:
        self._store.keep(response_id, response)
        response.task = asyncio.create_task(self._work(response, call), name=f"create_{response_id}")
        if response.streams:
            await _replay(response, call, 0)
        else:
            await send_response(call.send, 200, encode(response.document()))

    async def _work(self, response: StoredResponse, call: Call) -> None:
        async def send(message: Message) -> None:
            response.add(message.get("body", b""))

        try:
            await self._generate(replace(call, receive=_nobody_leaves, send=send))
        except ApiError:
            response.end("failed")
        finally:
            response.end()

    async def _cancel(self, response: StoredResponse, call: Call) -> None:
        if response.ended.is_set() or response.task is None:
            raise invalid("Cannot cancel a synchronous response.", param="response_id")
        response.status = "cancelled"
        response.task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await response.task
        await send_response(call.send, 200, encode(response.document()))


async def _nobody_leaves() -> Message:
    await asyncio.Event().wait()
    raise AssertionError


async def _replay(response: StoredResponse, call: Call, first: int) -> None:
    """The events of a response from one of them on, those to come included."""
    await call.begin_events()
    sent = first
    while True:
        response.grown.clear()
        is_last = response.ended.is_set()
        events = response.events()
        await call.send_events(b"".join(events[sent:]), more=not is_last)
        sent = max(sent, len(events))
        if is_last:
            return
        await response.grown.wait()


def _body(raw: bytes, response_id: str, conversation: list[Document] | None) -> bytes:
    """The request, as one that refers to no other; the last of two equal fields counts."""
    changes: dict[str, Any] = {"request_id": response_id}
    if conversation is not None:
        changes |= {"input": conversation, "previous_response_id": None}
    fields = msgspec.json.encode({**changes, "background": False})
    return raw.rstrip()[:-1] + b"," + fields[1:]


def _queued(response_id: str, asked: _Asked) -> Document:
    return {
        "id": response_id,
        "object": "response",
        "created_at": int(time.time()),
        "model": asked.model,
        "status": "queued",
        "background": bool(asked.background),
        "error": None,
        "incomplete_details": None,
        "instructions": None,
        "metadata": None,
        "output": [],
        "parallel_tool_calls": True,
        "temperature": 1.0,
        "top_p": 1.0,
        "tool_choice": "auto",
        "tools": [],
        "usage": None,
    }
