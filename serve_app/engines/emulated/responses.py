"""The Responses API: messages and function calls as typed events, and the stored responses.

As in vLLM, a response is stored in this engine's memory unless `store` is false. With `background` the
request returns at once and generation continues; such a stream can be replayed from any event. No response is
deleted. Responses also have the fields that the schema of Open Responses requires and vLLM omits.
"""

import asyncio
import contextlib
import time
import uuid
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field, replace
from typing import Any
from urllib.parse import parse_qs

import msgspec

from serve_app.engines.emulated.completions import AnswerContent, EmulatedAnswer
from serve_app.engines.emulated.http import ApiError, Call, encode, invalid, no_such_route
from serve_app.engines.emulated.requests import FIELDS, decode
from serve_app.engines.engine import Message, send_response

RESPONSES_PATH = "/v1/responses"
_CANCEL = "/cancel"
# vLLM evicts none, which its log calls a memory leak.
_MAX_RESPONSES = 1_000

Document = dict[str, Any]
# Fields of a request that its response repeats, with the values that stand for absent ones.
_REPEATED: Document = {
    "background": False,
    "frequency_penalty": 0.0,
    "instructions": None,
    "max_output_tokens": None,
    "max_tool_calls": None,
    "metadata": None,
    "parallel_tool_calls": True,
    "presence_penalty": 0.0,
    "previous_response_id": None,
    "prompt_cache_key": None,
    "reasoning": {"effort": None, "summary": None},
    "safety_identifier": None,
    "service_tier": "auto",
    "store": True,
    "temperature": 1.0,
    "text": {"format": {"type": "text"}},
    "tool_choice": "auto",
    "top_logprobs": 0,
    "top_p": 1.0,
    "truncation": "disabled",
    "user": None,
}
_TOOL = {"description": None, "parameters": None, "strict": None}


class ResponsesAnswer(EmulatedAnswer):
    """Answer of `/v1/responses`: one item with text or with a function call."""

    def __init__(self, answer: AnswerContent) -> None:
        super().__init__(answer)
        self._item_id = f"item_{answer.request_id}"
        self._events = 0

    def initial_events(self) -> bytes:
        """Return the events for a response in progress. vLLM sends them before the prefill."""
        running = self._response("in_progress", [])
        return self._event("response.created", response=running) + self._event(
            "response.in_progress", response=running
        )

    def first_token_events(self) -> bytes:
        """Return the events up to the empty content part or call."""
        added = self._event("response.output_item.added", output_index=0, item=self._item("in_progress", ""))
        if self._answer.call is not None:
            return added
        return added + self._text_event("response.content_part.added", part=_part(""))

    # `ends` is unused: `final_events` sends the end as separate events.
    def delta(self, choice: int, start: int, count: int, *, ends: bool) -> bytes:  # noqa: ARG002
        """Return what some tokens add to the text or to the arguments."""
        text = self._answer.outputs[choice].added(start, count)
        if self._answer.call is not None:
            return self._call_event("response.function_call_arguments.delta", delta=text)
        return self._text_event("response.output_text.delta", delta=text, logprobs=[])

    def final_events(self) -> bytes:
        """Return the complete text or arguments, item and response, each in its completion event."""
        text = self._answer.outputs[0].text
        if self._answer.call is not None:
            kind = "response.function_call_arguments.done"
            done = self._call_event(kind, arguments=text, name=self._answer.call)
        else:
            done = self._text_event("response.output_text.done", text=text, logprobs=[])
            done += self._text_event("response.content_part.done", part=_part(text))
        item = self._item(self._status, text)
        done += self._event("response.output_item.done", output_index=0, item=item)
        return done + self._event(f"response.{self._status}", response=self._response(self._status, [item]))

    def full_body(self) -> bytes:
        """Return a response object."""
        item = self._item(self._status, self._answer.outputs[0].text)
        return encode(self._response(self._status, [item]))

    @property
    def _status(self) -> str:
        return "completed" if self._answer.outputs[0].finish_reason == "stop" else "incomplete"

    def _text_event(self, kind: str, **content: Any) -> bytes:
        return self._call_event(kind, content_index=0, **content)

    def _call_event(self, kind: str, **content: Any) -> bytes:
        return self._event(kind, item_id=self._item_id, output_index=0, **content)

    def _event(self, kind: str, **content: Any) -> bytes:
        data = encode({"type": kind, **content, "sequence_number": self._events})
        self._events += 1
        return b"event: %s\ndata: %s\n\n" % (kind.encode(), data)

    def _item(self, status: str, text: str) -> Document:
        item: Document = {"id": self._item_id, "status": status}
        if (name := self._answer.call) is not None:
            call = {"type": "function_call", "call_id": f"call_{self._answer.request_id}", "name": name}
            return {**item, **call, "arguments": text}
        content = [] if status == "in_progress" else [_part(text)]
        return {**item, "type": "message", "role": "assistant", "content": content}

    def _response(self, status: str, output: list[Document]) -> Document:
        answer = self._answer
        counts = {
            "input_tokens": answer.prompt_tokens,
            "input_tokens_details": {"cached_tokens": answer.cached_tokens},
            "output_tokens": answer.output_tokens,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": answer.prompt_tokens + answer.output_tokens,
        }
        fields = answer.generation.fields
        return {
            **_response(answer.request_id, answer.created, answer.model, status, fields),
            "completed_at": int(time.time()) if status == "completed" else None,
            "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
            "output": output,
            "usage": counts if output else None,
        }


def _part(text: str) -> Document:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


def _response(
    response_id: str, created: int, model: str | None, status: str, fields: dict[str, Any]
) -> Document:
    """Return a response without output to a request with these fields."""
    tools = fields.get("tools")
    return {
        "id": response_id,
        "object": "response",
        "created_at": created,
        "completed_at": None,
        "model": model,
        "status": status,
        "error": None,
        "incomplete_details": None,
        "output": [],
        "usage": None,
        **{name: _completed(fields.get(name), default) for name, default in _REPEATED.items()},
        "tools": [_completed(tool, _TOOL) for tool in tools] if isinstance(tools, list) else [],
    }


def _completed(value: Any, default: Any) -> Any:
    """Return a value, or its default if it is null; an object gets the defaults of its absent fields."""
    if isinstance(value, dict) and isinstance(default, dict):
        return {**default, **value}
    return default if value is None else value


# -- stored responses --------------------------------------------------------------------------------------


@dataclass(slots=True, eq=False)
class StoredResponse:
    """A stored response.

    Attributes:
        conversation: the messages that it answers.
        queued: its document until it ends.
        is_stream: whether the answer is a stream of events.
        answer: bytes of the engine's answer: a document, or a stream's events.
        ended: set when the answer is complete.
        progressed: set when more of the answer is available.
        task: background task that generates it, if any.
        status: final status if it ended without an answer; otherwise empty.
    """

    conversation: list[Document]
    queued: Document
    is_stream: bool
    answer: bytearray = field(default_factory=bytearray)
    ended: asyncio.Event = field(default_factory=asyncio.Event)
    progressed: asyncio.Event = field(default_factory=asyncio.Event)
    task: asyncio.Task[None] | None = None
    status: str = ""

    def end(self, status: str = "") -> None:
        """Mark the end of the answer."""
        self.status = self.status or status
        self.ended.set()
        self.progressed.set()

    def events(self) -> list[bytes]:
        """Return the events so far, each with its terminating empty line."""
        return [event + b"\n\n" for event in bytes(self.answer).split(b"\n\n")[:-1]]

    def document(self) -> Document:
        """Return the response in its current state."""
        if self.status or not self.ended.is_set():
            return {**self.queued, "status": self.status or self.queued["status"]}
        document: Document
        if self.is_stream:
            document = msgspec.json.decode(self.events()[-1].partition(b"\ndata: ")[2])["response"]
        else:
            document = msgspec.json.decode(self.answer)
        return document

    def messages(self) -> list[Document]:
        """Return the conversation including the answer, as context for the next turn."""
        answers = [
            {"role": "assistant", "content": item["content"][0]["text"]}
            for item in self.document()["output"]
            if item["type"] == "message"
        ]
        return [*self.conversation, *answers]


class _StoreOptions(msgspec.Struct):
    """Fields needed for storing. The other fields are validated when the answer is generated."""

    input: str | list[Document]
    model: str | None = None
    store: bool | None = True
    stream: bool | None = False
    background: bool | None = False
    previous_response_id: str | None = None
    request_id: str | None = None


_decoder = msgspec.json.Decoder(_StoreOptions, strict=False)


class EmulatedResponses:
    """Endpoints of the Responses API; `generate` handles requests that refer to no stored response."""

    def __init__(self, generate: Callable[[Call], Awaitable[None]]) -> None:
        self._generate = generate
        self._stored: OrderedDict[str, StoredResponse] = OrderedDict()

    def __repr__(self) -> str:
        return f"<EmulatedResponses {len(self._stored)} stored>"

    async def create(self, call: Call) -> None:
        """Handle `POST /v1/responses`."""
        try:
            options = _decoder.decode(call.body)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            # The request parser reports the error.
            await self._generate(call)
            return
        if options.background and options.store is False:
            raise invalid("background can only be used when `store` is true", param="background")
        response_id = options.request_id or f"resp_{uuid.uuid4().hex}"
        before: list[Document] = []
        if options.previous_response_id is not None:
            before = self._find(options.previous_response_id).messages()
        own = (
            [{"role": "user", "content": options.input}] if isinstance(options.input, str) else options.input
        )
        conversation = [*before, *own]
        changes: Document = {"request_id": response_id}
        if before:
            changes["input"] = conversation
        # In JSON with duplicate fields, the last one wins.
        call = replace(call, body=call.body.rstrip()[:-1] + b"," + encode(changes)[1:])
        if options.store is False:
            await self._generate(call)
            return
        now = int(time.time())
        queued = _response(response_id, now, options.model, "queued", decode(FIELDS, call.body))
        response = StoredResponse(conversation, queued, bool(options.stream))
        if not options.background:
            await self._answer(response_id, response, call)
            return
        self._store(response_id, response)
        response.task = asyncio.create_task(self._work(response, call), name=f"create_{response_id}")
        if response.is_stream:
            await _replay(response, call, 0)
        else:
            await send_response(call.send, 200, encode(response.document()))

    async def serve(self, call: Call) -> None:
        """Handle `GET /v1/responses/ID` and `POST /v1/responses/ID/cancel`."""
        rest = call.scope["path"].removeprefix(RESPONSES_PATH + "/")
        cancels = rest.endswith(_CANCEL)
        if call.scope["method"] != ("POST" if cancels else "GET"):
            raise no_such_route(405)
        response = self._find(rest.removesuffix(_CANCEL))
        query = parse_qs(call.scope.get("query_string", b"").decode("latin-1"))
        if cancels:
            await self._cancel(response, call)
        elif query.get("stream", ["false"])[0].lower() != "true":
            await send_response(call.send, 200, encode(response.document()))
        elif response.task is None or not response.is_stream:
            raise invalid(f"Unknown response_id: {rest}", param="response_id")
        else:
            await _replay(response, call, int(query.get("starting_after", ["-1"])[0]) + 1)

    def _find(self, response_id: str) -> StoredResponse:
        found = self._stored.get(response_id)
        if found is None:
            message = f"Response with id '{response_id}' not found."
            raise ApiError(404, message, kind="invalid_request_error", param="response_id")
        return found

    def _store(self, response_id: str, response: StoredResponse) -> None:
        self._stored[response_id] = response
        while len(self._stored) > _MAX_RESPONSES:
            self._stored.popitem(last=False)

    async def _answer(self, response_id: str, response: StoredResponse, call: Call) -> None:
        """Answer the client and store the answer."""
        status = 0

        async def send(message: Message) -> None:
            nonlocal status
            status = message.get("status", status)
            response.answer += message.get("body", b"")
            if message["type"] == "http.response.body" and not message.get("more_body", False):
                # Store it before the client can request it.
                response.end()
                if status == 200:
                    self._store(response_id, response)
            await call.send(message)

        await self._generate(replace(call, send=send))

    async def _work(self, response: StoredResponse, call: Call) -> None:
        """Generate in the background."""

        async def send(message: Message) -> None:
            response.answer += message.get("body", b"")
            response.progressed.set()

        async def receive() -> Message:
            await asyncio.Event().wait()
            raise AssertionError("the event is never set")

        try:
            await self._generate(replace(call, receive=receive, send=send))
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


async def _replay(response: StoredResponse, call: Call, first: int) -> None:
    """Send the events of a response from number `first` on, including future ones."""
    await call.begin_events()
    sent = first
    while True:
        response.progressed.clear()
        is_last = response.ended.is_set()
        events = response.events()
        await call.send_events(b"".join(events[sent:]), more=not is_last)
        sent = max(sent, len(events))
        if is_last:
            return
        await response.progressed.wait()
