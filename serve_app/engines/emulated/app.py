"""HTTP API of the emulated engine: a plain ASGI app, because each framework layer costs CPU per token."""

import asyncio
import base64
import contextlib
import math
import random
import time
from array import array
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from typing import Any

from serve_app import __version__
from serve_app.engines.emulated.admission import EmulatedAdmission, ServedNames
from serve_app.engines.emulated.completions import (
    DONE,
    AnswerContent,
    ChatAnswer,
    CompletionAnswer,
    EmulatedAnswer,
)
from serve_app.engines.emulated.driver import EngineDriver, Ticket
from serve_app.engines.emulated.http import ApiError, Call, encode, engine_failed, no_such_route
from serve_app.engines.emulated.messages import MessageAnswer, anthropic_errors, failed_event
from serve_app.engines.emulated.metrics import CONTENT_TYPE, EngineMetrics
from serve_app.engines.emulated.requests import (
    Generation,
    read_chat,
    read_completion,
    read_count,
    read_embeddings,
    read_messages,
    read_responses,
    read_tokenize,
)
from serve_app.engines.emulated.responses import RESPONSES_PATH, EmulatedResponses, ResponsesAnswer
from serve_app.engines.emulated.text import Prompt, PseudoTokenizer
from serve_app.engines.engine import (
    Receive,
    Scope,
    Send,
    read_body,
    require_http,
    send_response,
    wait_for_disconnect,
)
from serve_app.errors import EngineError

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
        self._responses = EmulatedResponses(lambda call: self._generate(_RESPONSES, call))
        # Without rerank, score, classify and transcription: vLLM serves these for other kinds of models only.
        self._routes: dict[str, tuple[str, Callable[[Call], Awaitable[None]]]] = {
            "/v1/chat/completions": ("POST", lambda call: self._generate(_CHAT, call)),
            "/v1/completions": ("POST", lambda call: self._generate(_COMPLETIONS, call)),
            RESPONSES_PATH: ("POST", self._responses.create),
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
        if path.startswith(RESPONSES_PATH + "/"):
            return self._responses.serve
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
