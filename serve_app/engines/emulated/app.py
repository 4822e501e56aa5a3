"""The HTTP API of the emulated engine: a plain ASGI app, because each layer between costs CPU per token."""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass

from serve_app import __version__
from serve_app.engines.asgi import read_body, require_http, send_response, wait_for_disconnect
from serve_app.engines.emulated import errors
from serve_app.engines.emulated.admission import EmulatedAdmission
from serve_app.engines.emulated.answers.audio import TranscriptionAnswer, read_audio
from serve_app.engines.emulated.answers.completions import (
    DONE,
    AnswerHead,
    ChatAnswer,
    CompletionAnswer,
    EmulatedAnswer,
    encode,
)
from serve_app.engines.emulated.answers.embeddings import embedding, embeddings_answer
from serve_app.engines.emulated.answers.messages import MessageAnswer, scripted_message
from serve_app.engines.emulated.answers.pooling import (
    PooledHead,
    classes_answer,
    cohere_answer,
    pooling_answer,
    ranks_answer,
    scores_answer,
)
from serve_app.engines.emulated.answers.responses import ResponsesAnswer
from serve_app.engines.emulated.answers.scripted import ScriptedChat, ScriptedCompletion, ScriptedHead
from serve_app.engines.emulated.answers.scripted_responses import scripted_response
from serve_app.engines.emulated.content.spec import RawText
from serve_app.engines.emulated.driver import EngineDriver, Ticket
from serve_app.engines.emulated.http import Call
from serve_app.engines.emulated.messages import failed_event, in_anthropic_shape
from serve_app.engines.emulated.metrics import CONTENT_TYPE, EngineMetrics
from serve_app.engines.emulated.requests import (
    Generation,
    PooledInputs,
    read_chat,
    read_cohere_embed,
    read_completion,
    read_count,
    read_detokenize,
    read_embeddings,
    read_messages,
    read_pooling,
    read_rerank,
    read_responses,
    read_score,
    read_tokenize,
)
from serve_app.engines.emulated.stored.names import EmulatedNames
from serve_app.engines.emulated.stored.responses import RESPONSES_PATH, EmulatedResponses
from serve_app.engines.emulated.text import PseudoTokenizer, text_of
from serve_app.engines.engine import Receive, Scope, Send
from serve_app.errors import EngineError


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineParts:
    """The parts of the engine that the app needs."""

    driver: EngineDriver
    admission: EmulatedAdmission
    metrics: EngineMetrics
    tokenizer: PseudoTokenizer
    names: EmulatedNames
    max_model_len: int
    embedding_dimensions: int


@dataclass(frozen=True, slots=True)
class EmulatedRoute:
    """How one generating endpoint reads requests and writes answers.

    Attributes:
        write: an answer of placeholder text.
        write_scripted: an answer whose content the request prescribes.
        failed: the end of a stream whose engine has died.
    """

    read: Callable[[bytes, PseudoTokenizer], Generation]
    write: Callable[[AnswerHead], EmulatedAnswer]
    write_scripted: Callable[[ScriptedHead], EmulatedAnswer]
    id_prefix: str
    failed: Callable[[], bytes] = lambda: b"data: " + errors.engine_failed().body + b"\n\n" + DONE


_CHAT = EmulatedRoute(read_chat, ChatAnswer, ScriptedChat, "chatcmpl")
_COMPLETIONS = EmulatedRoute(read_completion, CompletionAnswer, ScriptedCompletion, "cmpl")
# As in vLLM, a message has the id of the chat that it is.
_MESSAGES = EmulatedRoute(read_messages, MessageAnswer, scripted_message, "chatcmpl", failed_event)
_RESPONSES = EmulatedRoute(read_responses, ResponsesAnswer, scripted_response, "resp")

# Whatever a sound says, its answer is some text.
_AUDIO = EmulatedRoute(read_audio, TranscriptionAnswer, ScriptedChat, "trsc")


@dataclass(frozen=True, slots=True)
class PoolingRoute:
    """How one endpoint that generates nothing reads requests and writes answers."""

    read: Callable[[bytes, PseudoTokenizer], PooledInputs]
    write: Callable[[PooledHead], bytes]
    id_prefix: str


_COHERE_EMBED = PoolingRoute(read_cohere_embed, cohere_answer, "embd")
_POOLING = PoolingRoute(read_pooling, pooling_answer, "pool")
_CLASSIFY = PoolingRoute(read_pooling, classes_answer, "classify")
_SCORE = PoolingRoute(read_score, scores_answer, "embd")
_RERANK = PoolingRoute(read_rerank, ranks_answer, "rerank")

# Different texts of one constrained request; further choices repeat them.
_MAX_TEXTS = 16


class EmulatedApp:
    """Routes requests; each generating request holds a ticket of the driver."""

    def __init__(self, parts: EngineParts) -> None:
        self._parts = parts
        self._created = int(time.time())
        self._responses = EmulatedResponses(lambda call: self._generate(_RESPONSES, call))
        self._routes: dict[str, tuple[str, Callable[[Call], Awaitable[None]]]] = {
            "/v1/chat/completions": ("POST", lambda call: self._generate(_CHAT, call)),
            "/v1/completions": ("POST", lambda call: self._generate(_COMPLETIONS, call)),
            RESPONSES_PATH: ("POST", self._responses.create),
            "/v1/messages": ("POST", _anthropic(lambda call: self._generate(_MESSAGES, call))),
            "/v1/messages/count_tokens": ("POST", _anthropic(self._count_tokens)),
            **dict.fromkeys(
                ("/v1/audio/transcriptions", "/v1/audio/translations"),
                ("POST", lambda call: self._generate(_AUDIO, call)),
            ),
            "/v1/embeddings": ("POST", self._embed),
            "/v1/models": ("GET", self._models),
            "/v1/load_lora_adapter": ("POST", self._load_adapter),
            "/v1/unload_lora_adapter": ("POST", self._unload_adapter),
            "/v2/embed": ("POST", lambda call: self._pool(_COHERE_EMBED, call)),
            "/pooling": ("POST", lambda call: self._pool(_POOLING, call)),
            "/classify": ("POST", lambda call: self._pool(_CLASSIFY, call)),
            **dict.fromkeys(("/v1/score", "/score"), ("POST", lambda call: self._pool(_SCORE, call))),
            **dict.fromkeys(
                ("/v1/rerank", "/v2/rerank", "/rerank"), ("POST", lambda call: self._pool(_RERANK, call))
            ),
            "/tokenize": ("POST", self._tokenize),
            "/detokenize": ("POST", self._detokenize),
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
        # Some servers report a client that has disconnected by an OSError from `send`.
        with contextlib.suppress(OSError):
            await self._route(call)

    async def _route(self, call: Call) -> None:
        path = call.scope["path"]
        method, handler = self._routes.get(path, ("", None))
        if path.startswith(RESPONSES_PATH + "/"):
            method, handler = call.scope["method"], self._responses.serve
        if handler is None:
            await send_response(call.send, 404, errors.no_such_route(404).body)
        elif call.scope["method"] != method:
            await send_response(call.send, 405, errors.no_such_route(405).body)
        else:
            try:
                await handler(call)
            except errors.ApiError as error:
                await send_response(call.send, error.status, error.body)

    # -- generation -----------------------------------------------------------------------------------------

    async def _generate(self, endpoint: EmulatedRoute, call: Call) -> None:
        generation = endpoint.read(call.body, self._parts.tokenizer)
        model = self._parts.admission.check_model(generation.model)
        request_id = generation.request_id or call.request_id(endpoint.id_prefix)
        ticket = self._parts.admission.admit(generation, request_id, await _constrained_texts(generation))
        head = AnswerHead(
            request_id=request_id,
            created=int(time.time()),
            model=model,
            sequences=ticket.sequences,
            finish_reasons=ticket.finish_reasons,
            prompts=len(generation.prompts),
            include_usage=generation.include_usage,
        )
        if generation.spec is None:
            answer = endpoint.write(head)
        else:
            answer = endpoint.write_scripted(ScriptedHead(head, generation.spec, tuple(ticket.scripts)))
        async with self._in_engine(call, ticket):
            if generation.stream:
                await self._stream(call, ticket, answer, endpoint.failed)
            else:
                await _answer_whole(call, ticket, answer.whole)

    @contextlib.asynccontextmanager
    async def _in_engine(self, call: Call, ticket: Ticket) -> AsyncIterator[None]:
        """Keep a ticket's sequences in the engine until the block ends or the client disconnects."""
        try:
            self._parts.driver.submit(ticket)
        except EngineError as error:
            raise errors.engine_failed() from error
        watcher = asyncio.ensure_future(_abandon_on_disconnect(call, ticket))
        try:
            yield
        finally:
            watcher.cancel()
            self._parts.driver.close(ticket)

    async def _stream(
        self, call: Call, ticket: Ticket, answer: EmulatedAnswer, failed: Callable[[], bytes]
    ) -> None:
        """Send tokens as they are generated."""
        await call.begin_events()
        sent = [0] * len(ticket.sequences)
        if announcement := answer.announcement():
            await call.send_events(announcement, more=True)
        events = answer.opening()
        done = False
        while not done:
            try:
                await ticket.progress()
            except EngineError:
                # The status line has been sent, so the error is an event.
                await call.send_events(failed(), more=False)
                return
            if ticket.abandoned:
                return
            # Read before the tokens are collected: more may be generated while they are sent.
            done = ticket.is_done
            events += self._new_tokens(ticket, answer, sent)
            if done:
                events += answer.ending()
            if events:
                await call.send_events(events, more=not done)
            events = b""

    def _new_tokens(self, ticket: Ticket, answer: EmulatedAnswer, sent: list[int]) -> bytes:
        """Events of the tokens that are not sent yet; `sent` is updated."""
        parts: list[bytes] = []
        for choice, sequence in enumerate(ticket.sequences):
            start, end = sent[choice], self._parts.driver.output_tokens(sequence)
            if end > start:
                sent[choice] = end
                parts.append(answer.delta(choice, start, end - start, ends=end == sequence.target_tokens))
        return b"".join(parts)

    async def _embed(self, call: Call) -> None:
        body, prompts = read_embeddings(call.body, self._parts.tokenizer)
        model = self._parts.admission.check_model(body.model)
        request_id = call.request_id("embd")
        ticket = self._parts.admission.admit_embeddings(prompts, body.priority, request_id)
        dimensions = body.dimensions or self._parts.embedding_dimensions

        def whole() -> bytes:
            return embeddings_answer(
                request_id,
                model,
                [embedding(prompt.fingerprint, dimensions) for prompt in prompts],
                prompt_tokens=sum(prompt.tokens for prompt in prompts),
                as_base64=body.encoding_format == "base64",
            )

        async with self._in_engine(call, ticket):
            await _answer_whole(call, ticket, whole)

    async def _pool(self, route: PoolingRoute, call: Call) -> None:
        inputs = route.read(call.body, self._parts.tokenizer)
        model = self._parts.admission.check_model(inputs.model)
        request_id = call.request_id(route.id_prefix)
        ticket = self._parts.admission.admit_embeddings(inputs.prompts, inputs.priority, request_id)
        head = PooledHead(
            request_id=request_id,
            created=int(time.time()),
            model=model,
            seeds=[prompt.fingerprint for prompt in inputs.prompts],
            texts=inputs.texts,
            prompt_tokens=sum(prompt.tokens for prompt in inputs.prompts),
            dimensions=inputs.dimensions or self._parts.embedding_dimensions,
            most=inputs.most,
        )
        async with self._in_engine(call, ticket):
            await _answer_whole(call, ticket, lambda: route.write(head))

    # -- other endpoints ------------------------------------------------------------------------------------

    async def _models(self, call: Call) -> None:
        cards = self._parts.names.cards(self._created, self._parts.max_model_len)
        await send_response(call.send, 200, encode({"object": "list", "data": cards}))

    async def _load_adapter(self, call: Call) -> None:
        name = self._parts.names.load(call.body)
        await send_response(
            call.send, 200, f"Success: LoRA adapter '{name}' added successfully.".encode(), b"text/plain"
        )

    async def _unload_adapter(self, call: Call) -> None:
        name = self._parts.names.unload(call.body)
        await send_response(
            call.send, 200, f"Success: LoRA adapter '{name}' removed successfully.".encode(), b"text/plain"
        )

    async def _tokenize(self, call: Call) -> None:
        model, text = read_tokenize(call.body)
        self._parts.admission.check_model(model)
        tokens = self._parts.tokenizer.token_ids(text)
        counts = {"count": len(tokens), "max_model_len": self._parts.max_model_len}
        await send_response(call.send, 200, encode({**counts, "tokens": tokens, "token_strs": None}))

    async def _detokenize(self, call: Call) -> None:
        model, tokens = read_detokenize(call.body)
        self._parts.admission.check_model(model)
        await send_response(call.send, 200, encode({"prompt": text_of(tokens)}))

    async def _version(self, call: Call) -> None:
        await send_response(call.send, 200, encode({"version": f"emulated {__version__}"}))

    async def _count_tokens(self, call: Call) -> None:
        model, tokens = read_count(call.body, self._parts.tokenizer)
        self._parts.admission.check_model(model)
        counted = {"input_tokens": tokens, "context_management": {"original_input_tokens": tokens}}
        await send_response(call.send, 200, encode(counted))

    async def _health(self, call: Call) -> None:
        try:
            self._parts.driver.check()
        except EngineError:
            await send_response(call.send, 503, b"")
        else:
            await send_response(call.send, 200, b"")

    async def _metrics(self, call: Call) -> None:
        await send_response(call.send, 200, self._parts.metrics.text(), CONTENT_TYPE)


def _anthropic(handler: Callable[[Call], Awaitable[None]]) -> Callable[[Call], Awaitable[None]]:
    """The handler, with its errors in the shape of Anthropic's API."""

    async def answered(call: Call) -> None:
        try:
            await handler(call)
        except errors.ApiError as error:
            raise in_anthropic_shape(error) from error

    return answered


async def _constrained_texts(generation: Generation) -> Sequence[RawText]:
    """Texts for a constrained request, sampled in a thread so that a large schema delays no step."""
    spec = generation.spec
    if spec is None or not spec.is_constrained:
        return ()
    count = min(_MAX_TEXTS, len(generation.prompts) * generation.choices)
    return await asyncio.to_thread(spec.texts, count)


async def _answer_whole(call: Call, ticket: Ticket, whole: Callable[[], bytes]) -> None:
    """Send the answer when all of it is generated."""
    try:
        while not ticket.is_done and not ticket.abandoned:
            await ticket.progress()
    except EngineError as error:
        raise errors.engine_failed() from error
    if not ticket.abandoned:
        await send_response(call.send, 200, whole())


async def _abandon_on_disconnect(call: Call, ticket: Ticket) -> None:
    await wait_for_disconnect(call.receive)
    ticket.abandon()
