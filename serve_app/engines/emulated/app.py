"""The HTTP interface of the emulated engine.

- `EmulatedApp`: a plain ASGI app, because each framework layer costs CPU per token.
- `ChatAnswer`, `CompletionAnswer`: OpenAI's chat and text completions. Events and their order are those of
  vLLM: for chats a chunk with the role, then chunks with one or more tokens each (the last one with the
  finish reason), the usage if requested, `[DONE]`.
- `MessageAnswer`: Anthropic's Messages API. As in vLLM, a message begins with its first token, and its first
  and last events have the token counts.
- `ResponsesAnswer`: the Responses API, with messages and function calls as typed events. As in vLLM without
  its store, no response is stored. Responses also have the fields that the schema of Open Responses requires
  and vLLM omits.
"""

import asyncio
import base64
import contextlib
import itertools
import math
import random
import time
from abc import ABC, abstractmethod
from array import array
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import msgspec

from serve_app import __version__
from serve_app.engines.emulated.driver import (
    CONTENT_TYPE,
    EmulatedAdmission,
    EngineDriver,
    EngineMetrics,
    ServedNames,
    Ticket,
)
from serve_app.engines.emulated.requests import (
    ApiError,
    Call,
    GeneratedOutput,
    Generation,
    Prompt,
    PseudoTokenizer,
    encode,
    engine_failed,
    no_such_route,
    read_chat,
    read_completion,
    read_count,
    read_embeddings,
    read_messages,
    read_responses,
    read_tokenize,
)
from serve_app.engines.engine import (
    Receive,
    Scope,
    Send,
    read_body,
    require_http,
    send_response,
    wait_for_disconnect,
)
from serve_app.engines.model import EngineSequence
from serve_app.errors import EngineError

DONE = b"data: [DONE]\n\n"


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerContent:
    """Content of an answer, independent of the API that formats it.

    Attributes:
        created: Unix time in whole seconds.
    """

    request_id: str
    created: int
    model: str
    generation: Generation
    ticket: Ticket

    @property
    def outputs(self) -> Sequence[GeneratedOutput]:
        """Generated outputs, one per choice, in the order of the prompts."""
        return self.ticket.outputs

    @property
    def call(self) -> str | None:
        """Name of the tool that the answer calls, if any."""
        return self.generation.call

    def prompt_ids(self, choice: int) -> dict[str, Any]:
        """Return the field with the prompt's ids, if they are requested."""
        if not self.generation.body.return_token_ids:
            return {}
        return {"prompt_token_ids": self.generation.prompts[choice // self.generation.choices].ids}

    def token_ids(self, choice: int, start: int, count: int) -> dict[str, Any]:
        """Return the field with the ids of some tokens, if they are requested."""
        if not self.generation.body.return_token_ids:
            return {}
        return {"token_ids": self.outputs[choice].ids(start, count)}

    @property
    def prompt_tokens(self) -> int:
        """Tokens of the prompts. The choices of one prompt share its tokens."""
        return sum(sequence.prompt_tokens for sequence in self._one_per_prompt())

    @property
    def cached_tokens(self) -> int:
        """Prompt tokens found in the prefix cache."""
        return sum(sequence.cached_tokens for sequence in self._one_per_prompt())

    @property
    def output_tokens(self) -> int:
        """Output tokens of all choices."""
        return sum(sequence.output_tokens for sequence in self.ticket.sequences)

    def _one_per_prompt(self) -> Sequence[EngineSequence]:
        return self.ticket.sequences[:: self.generation.choices]


class EmulatedAnswer(ABC):
    """Formatter of one answer, complete or as a stream."""

    def __init__(self, answer: AnswerContent) -> None:
        self._answer = answer

    def initial_events(self) -> bytes:
        """Return the events that a stream sends before the engine computes anything."""
        return b""

    def first_token_events(self) -> bytes:
        """Return the events that are sent together with the first token, before it."""
        return b""

    @abstractmethod
    def delta(self, choice: int, start: int, count: int, *, ends: bool) -> bytes:
        """Return the events for `count` tokens of a choice from `start` on; `ends` marks its last tokens."""

    @abstractmethod
    def final_events(self) -> bytes:
        """Return the end of a stream, sent after the last token of every choice."""

    @abstractmethod
    def full_body(self) -> bytes:
        """Return the answer as one JSON object."""


class _ChoicesAnswer(EmulatedAnswer):
    """Common part of the two completion APIs: choices in one object or in chunks.

    Subclasses define the object names of OpenAI's API and the content of a choice.
    """

    _kind: ClassVar[str]
    _chunk_kind: ClassVar[str]

    def __init__(self, answer: AnswerContent) -> None:
        super().__init__(answer)
        # Serialized once, because it is the same in all chunks of a stream.
        common = encode(self._common(self._chunk_kind)).removesuffix(b"}")
        self._chunk_start = b"data: " + common + b',"choices":['

    def delta(self, choice: int, start: int, count: int, *, ends: bool) -> bytes:
        """Return one chunk."""
        content = {
            **self._delta(choice, start, count),
            "logprobs": None,
            "finish_reason": self._finish_reason(choice) if ends else None,
            **self._answer.token_ids(choice, start, count),
        }
        return self._chunk(choice, content)

    def final_events(self) -> bytes:
        """Return the usage, if requested, and the end marker."""
        if not self._answer.generation.includes_usage:
            return DONE
        usage = {**self._common(self._chunk_kind), "choices": [], "usage": self._usage()}
        return b"data: " + encode(usage) + b"\n\n" + DONE

    def full_body(self) -> bytes:
        """Return the object with all choices."""
        choices = [
            {
                "index": choice,
                **self._content(choice),
                "logprobs": None,
                "finish_reason": self._finish_reason(choice),
                "stop_reason": None,
            }
            for choice in range(len(self._answer.outputs))
        ]
        return encode({**self._common(self._kind), "choices": choices, "usage": self._usage()})

    def _chunk(self, choice: int, content: dict[str, Any], more: bytes = b"") -> bytes:
        """Return a chunk with one choice and `more` fields."""
        return self._chunk_start + encode({"index": choice, **content}) + b"]" + more + b"}\n\n"

    def _common(self, kind: str) -> dict[str, Any]:
        """Return the fields that begin every object and chunk of an answer."""
        answer = self._answer
        return {"id": answer.request_id, "object": kind, "created": answer.created, "model": answer.model}

    def _usage(self) -> dict[str, Any]:
        answer = self._answer
        return {
            "prompt_tokens": answer.prompt_tokens,
            "total_tokens": answer.prompt_tokens + answer.output_tokens,
            "completion_tokens": answer.output_tokens,
            "prompt_tokens_details": {"cached_tokens": answer.cached_tokens},
        }

    def _finish_reason(self, choice: int) -> str:
        return self._answer.outputs[choice].finish_reason

    @abstractmethod
    def _content(self, choice: int) -> dict[str, Any]:
        """Return the text of a finished choice."""

    @abstractmethod
    def _delta(self, choice: int, start: int, count: int) -> dict[str, Any]:
        """Return the text of some tokens of a choice."""


class ChatAnswer(_ChoicesAnswer):
    """Answer of `/v1/chat/completions`."""

    _kind = "chat.completion"
    _chunk_kind = "chat.completion.chunk"

    def first_token_events(self) -> bytes:
        """Return the role, once per choice."""
        role = {"delta": {"role": "assistant", "content": ""}, "logprobs": None, "finish_reason": None}
        return b"".join(
            self._chunk(choice, role, _as_fields(self._answer.prompt_ids(choice)))
            for choice in range(len(self._answer.outputs))
        )

    def _delta(self, choice: int, start: int, count: int) -> dict[str, Any]:
        text = self._answer.outputs[choice].added(start, count)
        if self._answer.call is None:
            return {"delta": {"content": text}}
        return {"delta": {"tool_calls": [{"index": 0, **self._call(choice, text)}]}}

    def _content(self, choice: int) -> dict[str, Any]:
        text = self._answer.outputs[choice].text
        message: dict[str, Any] = {"role": "assistant", "content": text, "refusal": None, "annotations": []}
        if self._answer.call is not None:
            message |= {"content": "", "tool_calls": [self._call(choice, text)]}
        return {"message": message}

    def _call(self, choice: int, arguments: str) -> dict[str, Any]:
        return {
            "id": f"chatcmpl-tool-{self._answer.request_id}-{choice}",
            "type": "function",
            "function": {"name": self._answer.call, "arguments": arguments},
        }

    def _finish_reason(self, choice: int) -> str:
        return super()._finish_reason(choice) if self._answer.call is None else "tool_calls"


class CompletionAnswer(_ChoicesAnswer):
    """Answer of `/v1/completions`."""

    _kind = _chunk_kind = "text_completion"

    def _delta(self, choice: int, start: int, count: int) -> dict[str, Any]:
        text = self._answer.outputs[choice].added(start, count)
        return {"text": text, **({} if start else self._answer.prompt_ids(choice))}

    def _content(self, choice: int) -> dict[str, Any]:
        return {"text": self._answer.outputs[choice].text}


def _as_fields(fields: dict[str, Any]) -> bytes:
    """Return fields for the end of an object that has others."""
    return b"," + encode(fields)[1:-1] if fields else b""


# Anthropic's schema requires these fields; vLLM omits them.
_NO_USAGE = ("cache_creation", "inference_geo", "output_tokens_details", "server_tool_use", "service_tier")


class MessageAnswer(EmulatedAnswer):
    """Answer of `/v1/messages`: one block with text or with a tool call."""

    def __init__(self, answer: AnswerContent) -> None:
        super().__init__(answer)
        self._block: dict[str, Any] = {"type": "text", "text": "", "citations": None}
        if answer.call is not None:
            call_id = f"chatcmpl-tool-{answer.request_id}"
            called = {"name": answer.call, "input": {}, "caller": {"type": "direct"}}
            self._block = {"type": "tool_use", "id": call_id, **called}

    def first_token_events(self) -> bytes:
        """Return the start events of the message and its block."""
        message = self._message([], None, {**self._usage(), "output_tokens": 0})
        start = _event("message_start", message=message)
        return start + _event("content_block_start", content_block=self._block, index=0)

    # `ends` is unused: `final_events` sends the end as separate events.
    def delta(self, choice: int, start: int, count: int, *, ends: bool) -> bytes:  # noqa: ARG002
        """Return the text of some tokens as a delta."""
        text = self._answer.outputs[choice].added(start, count)
        delta = {"type": "text_delta", "text": text}
        if self._answer.call is not None:
            delta = {"type": "input_json_delta", "partial_json": text}
        return _event("content_block_delta", delta=delta, index=0)

    def final_events(self) -> bytes:
        """Return the end of the block, the stop reason, and the end of the message."""
        end = _event("content_block_stop", index=0)
        stop = _event("message_delta", delta=_stop(self._reason()), usage=self._usage())
        return end + stop + _event("message_stop")

    def full_body(self) -> bytes:
        """Return a message object."""
        text = self._answer.outputs[0].text
        more = {"text": text} if self._answer.call is None else {"input": msgspec.json.decode(text)}
        return encode(self._message([{**self._block, **more}], self._reason(), self._usage()))

    def _reason(self) -> str:
        if self._answer.call is not None:
            return "tool_use"
        return "max_tokens" if self._answer.outputs[0].finish_reason == "length" else "end_turn"

    def _usage(self) -> dict[str, int | None]:
        """Return Anthropic's usage object, in which `input_tokens` excludes cached tokens."""
        answer = self._answer
        return {
            "input_tokens": answer.prompt_tokens - answer.cached_tokens,
            "output_tokens": answer.output_tokens,
            "cache_read_input_tokens": answer.cached_tokens,
            "cache_creation_input_tokens": 0,
            **dict.fromkeys(_NO_USAGE),
        }

    def _message(
        self, content: list[dict[str, Any]], reason: str | None, usage: dict[str, int | None]
    ) -> dict[str, Any]:
        return {
            "id": self._answer.request_id,
            "type": "message",
            "role": "assistant",
            "content": content,
            "model": self._answer.model,
            **_stop(reason),
            "usage": usage,
        }


def _stop(reason: str | None) -> dict[str, Any]:
    return {"stop_reason": reason, "stop_sequence": None, "stop_details": None, "container": None}


def failed_event() -> bytes:
    """Return the event that ends a stream whose engine has failed."""
    return b"event: error\ndata: %s\n\n" % _error(engine_failed())


def anthropic_errors(handler: Callable[[Call], Awaitable[None]]) -> Callable[[Call], Awaitable[None]]:
    """Wrap a handler so that its errors have Anthropic's shape, as vLLM's route does."""

    async def answered(call: Call) -> None:
        try:
            await handler(call)
        except ApiError as error:
            error.body = _error(error)
            raise

    return answered


def _error(error: ApiError) -> bytes:
    return encode({"type": "error", "error": {"type": error.kind, "message": str(error)}})


def _event(kind: str, **content: Any) -> bytes:
    return b"event: %s\ndata: %s\n\n" % (kind.encode(), encode({"type": kind, **content}))


# Fields of a request that its response repeats, with the values that stand for absent ones.
_REPEATED: dict[str, Any] = {
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
        self._numbers = itertools.count()

    def initial_events(self) -> bytes:
        """Return the events for a response in progress. vLLM sends them before the prefill."""
        running = self._response("in_progress", [])
        created = self._event("response.created", response=running)
        return created + self._event("response.in_progress", response=running)

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
        return _event(kind, **content, sequence_number=next(self._numbers))

    def _item(self, status: str, text: str) -> dict[str, Any]:
        item: dict[str, Any] = {"id": self._item_id, "status": status}
        if (name := self._answer.call) is not None:
            call = {"type": "function_call", "call_id": f"call_{self._answer.request_id}", "name": name}
            return {**item, **call, "arguments": text}
        content = [] if status == "in_progress" else [_part(text)]
        return {**item, "type": "message", "role": "assistant", "content": content}

    def _response(self, status: str, output: list[dict[str, Any]]) -> dict[str, Any]:
        answer = self._answer
        counts = {
            "input_tokens": answer.prompt_tokens,
            "input_tokens_details": {"cached_tokens": answer.cached_tokens},
            "output_tokens": answer.output_tokens,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": answer.prompt_tokens + answer.output_tokens,
        }
        fields = answer.generation.fields
        tools = fields.get("tools")
        return {
            "id": answer.request_id,
            "object": "response",
            "created_at": answer.created,
            "completed_at": int(time.time()) if status == "completed" else None,
            "model": answer.model,
            "status": status,
            "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
            "output": output,
            "usage": counts if output else None,
            "store": False,
            **{name: _completed(fields.get(name), default) for name, default in _REPEATED.items()},
            "tools": [_completed(tool, _TOOL) for tool in tools] if isinstance(tools, list) else [],
        }


def _part(text: str) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


def _completed(value: Any, default: Any) -> Any:
    """Return a value, or its default if it is null; an object gets the defaults of its absent fields."""
    if isinstance(value, dict) and isinstance(default, dict):
        return {**default, **value}
    return default if value is None else value


# Length of embeddings.
_DIMENSIONS = 64


@dataclass(frozen=True, slots=True)
class EmulatedRoute:
    """A generating endpoint: its request parser, answer format, and last event after an engine failure."""

    read: Callable[[bytes, PseudoTokenizer], Generation]
    answer: Callable[[AnswerContent], EmulatedAnswer]
    id_prefix: str
    failed: Callable[[], bytes] = lambda: b"data: " + engine_failed().body + b"\n\n" + DONE


_CHAT = EmulatedRoute(read_chat, ChatAnswer, "chatcmpl")
_COMPLETIONS = EmulatedRoute(read_completion, CompletionAnswer, "cmpl")
# As in vLLM, a message has the id of the chat completion that it is based on.
_MESSAGES = EmulatedRoute(read_messages, MessageAnswer, "chatcmpl", failed_event)
_RESPONSES = EmulatedRoute(read_responses, ResponsesAnswer, "resp")


class EmulatedApp:
    """ASGI app that routes requests. Each generating request holds a ticket of the driver."""

    def __init__(
        self,
        driver: EngineDriver,
        admission: EmulatedAdmission,
        metrics: EngineMetrics,
        tokenizer: PseudoTokenizer,
        names: ServedNames,
    ) -> None:
        self._driver = driver
        self._admission = admission
        self._metrics_page = metrics.text
        self._tokenizer = tokenizer
        self._names = names
        self._created = int(time.time())
        # Without rerank, score, classify and transcription: vLLM serves these for other kinds of models only.
        self._routes: dict[str, tuple[str, Callable[[Call], Awaitable[None]]]] = {
            "/v1/chat/completions": ("POST", lambda call: self._generate(_CHAT, call)),
            "/v1/completions": ("POST", lambda call: self._generate(_COMPLETIONS, call)),
            "/v1/responses": ("POST", lambda call: self._generate(_RESPONSES, call)),
            "/v1/messages": ("POST", anthropic_errors(lambda call: self._generate(_MESSAGES, call))),
            "/v1/messages/count_tokens": ("POST", anthropic_errors(self._count_tokens)),
            "/v1/embeddings": ("POST", self._embed),
            "/v1/models": ("GET", self._models),
            "/v1/load_lora_adapter": ("POST", self._load_adapter),
            "/v1/unload_lora_adapter": ("POST", self._unload_adapter),
            "/tokenize": ("POST", self._tokenize),
            "/version": ("GET", self._version),
            "/health": ("GET", self._health),
            "/metrics": ("GET", self._metrics),
        }

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        require_http(scope)
        body = await read_body(receive)
        if body is None:
            return
        call = Call(scope, body, receive, send)
        # Some servers raise an OSError from `send` if the client has disconnected.
        with contextlib.suppress(OSError):
            try:
                await self._handler(scope)(call)
            except ApiError as error:
                await send_response(send, error.status, error.body)

    def _handler(self, scope: Scope) -> Callable[[Call], Awaitable[None]]:
        path = scope["path"]
        if path not in self._routes:
            raise no_such_route(404)
        method, handler = self._routes[path]
        if scope["method"] != method:
            raise no_such_route(405)
        return handler

    # -- generation -----------------------------------------------------------------------------------------

    async def _generate(self, route: EmulatedRoute, call: Call) -> None:
        generation = route.read(call.body, self._tokenizer)
        model = self._names.check(generation.body.model)
        request_id = generation.request_id or call.request_id(route.id_prefix)
        ticket = self._admission.admit(generation, request_id)
        content = AnswerContent(
            request_id=request_id,
            created=int(time.time()),
            model=model,
            generation=generation,
            ticket=ticket,
        )
        answer = route.answer(content)
        async with self._in_engine(call, ticket):
            if generation.body.stream:
                await self._stream(call, ticket, answer, route.failed)
            else:
                await _answer_at_once(call, ticket, answer.full_body)

    @contextlib.asynccontextmanager
    async def _in_engine(self, call: Call, ticket: Ticket) -> AsyncIterator[None]:
        """Hold a ticket's sequences in the engine until the block ends or the client disconnects."""
        try:
            self._driver.submit(ticket)
        except EngineError as error:
            raise engine_failed() from error
        watcher = asyncio.ensure_future(_abandon_on_disconnect(call, ticket))
        try:
            yield
        finally:
            watcher.cancel()
            self._driver.close(ticket)

    async def _stream(
        self, call: Call, ticket: Ticket, answer: EmulatedAnswer, failed: Callable[[], bytes]
    ) -> None:
        """Send tokens as they are generated."""
        await call.begin_events()
        sent = [0] * len(ticket.sequences)
        if initial := answer.initial_events():
            await call.send_events(initial, more=True)
        events = answer.first_token_events()
        done = False
        while not done:
            try:
                await ticket.progress()
            except EngineError:
                # The status line was already sent, so the error becomes an event.
                await call.send_events(failed(), more=False)
                return
            if ticket.abandoned:
                return
            # Read this before collecting tokens, because more may be generated while they are sent.
            done = ticket.is_done
            events += self._new_tokens(ticket, answer, sent)
            if done:
                events += answer.final_events()
            if events:
                await call.send_events(events, more=not done)
            events = b""

    def _new_tokens(self, ticket: Ticket, answer: EmulatedAnswer, sent: list[int]) -> bytes:
        """Return events for the tokens that are not sent yet, and update `sent`."""
        parts: list[bytes] = []
        for choice, sequence in enumerate(ticket.sequences):
            start, end = sent[choice], self._driver.output_tokens(sequence)
            if end > start:
                sent[choice] = end
                parts.append(answer.delta(choice, start, end - start, ends=end == sequence.target_tokens))
        return b"".join(parts)

    async def _embed(self, call: Call) -> None:
        body, prompts = read_embeddings(call.body, self._tokenizer)
        model = self._names.check(body.model)
        request_id = call.request_id("embd")
        ticket = self._admission.admit_embeddings(prompts, body.priority, request_id)
        as_base64 = body.encoding_format == "base64"

        def whole() -> bytes:
            data = [
                {"object": "embedding", "index": index, "embedding": _embedded(vector, as_base64=as_base64)}
                for index, vector in enumerate(map(_vector, prompts))
            ]
            tokens = sum(prompt.tokens for prompt in prompts)
            usage = {"prompt_tokens": tokens, "total_tokens": tokens}
            listed = {"id": request_id, "object": "list", "model": model, "data": data, "usage": usage}
            return encode(listed)

        async with self._in_engine(call, ticket):
            await _answer_at_once(call, ticket, whole)

    # -- other endpoints ------------------------------------------------------------------------------------

    async def _models(self, call: Call) -> None:
        cards = self._names.cards(self._created, self._admission.limits.max_model_len)
        await _send(call, {"object": "list", "data": cards})

    async def _load_adapter(self, call: Call) -> None:
        self._names.load(call.body)
        await send_response(call.send, 200, b"")

    async def _unload_adapter(self, call: Call) -> None:
        self._names.unload(call.body)
        await send_response(call.send, 200, b"")

    async def _tokenize(self, call: Call) -> None:
        model, prompt = read_tokenize(call.body, self._tokenizer)
        self._names.check(model)
        counts = {"count": prompt.tokens, "max_model_len": self._admission.limits.max_model_len}
        await _send(call, {**counts, "tokens": prompt.ids, "token_strs": None})

    async def _version(self, call: Call) -> None:
        await _send(call, {"version": f"emulated {__version__}"})

    async def _count_tokens(self, call: Call) -> None:
        model, tokens = read_count(call.body, self._tokenizer)
        self._names.check(model)
        await _send(call, {"input_tokens": tokens})

    async def _health(self, call: Call) -> None:
        try:
            self._driver.check()
        except EngineError:
            await send_response(call.send, 503, b"")
        else:
            await send_response(call.send, 200, b"")

    async def _metrics(self, call: Call) -> None:
        await send_response(call.send, 200, self._metrics_page(), CONTENT_TYPE)


async def _send(call: Call, document: dict[str, Any]) -> None:
    await send_response(call.send, 200, encode(document))


async def _answer_at_once(call: Call, ticket: Ticket, whole: Callable[[], bytes]) -> None:
    """Send the complete answer after its last token."""
    try:
        while not ticket.is_done and not ticket.abandoned:
            await ticket.progress()
    except EngineError as error:
        raise engine_failed() from error
    if not ticket.abandoned:
        await send_response(call.send, 200, whole())


async def _abandon_on_disconnect(call: Call, ticket: Ticket) -> None:
    await wait_for_disconnect(call.receive)
    ticket.abandon()


def _vector(prompt: Prompt) -> list[float]:
    """Return a unit vector that depends on the input only, so that equal inputs have equal vectors."""
    rng = random.Random(repr(prompt.source))  # noqa: S311 - a placeholder, not a secret
    values = [rng.gauss(0.0, 1.0) for _ in range(_DIMENSIONS)]
    norm = math.hypot(*values)
    return [value / norm for value in values]


def _embedded(vector: list[float], *, as_base64: bool) -> str | list[float]:
    """Encode the vector for JSON. Base64 (the OpenAI SDK's default) holds little-endian 32-bit floats."""
    return base64.b64encode(array("f", vector).tobytes()).decode() if as_base64 else vector
