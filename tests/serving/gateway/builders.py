"""Builders for gateway tests: a fake scheduler client, replicas with scripted answers, real servers."""

import asyncio
import contextlib
import itertools
import json
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import httpx

from serve_app.core.commands import Dispatch
from serve_app.core.events import DispatchFailure
from serve_app.engines.emulated.engine import EmulatedEngine, EmulatedEngineSettings
from serve_app.engines.engine import ASGIApp, Receive, Scope, Send
from serve_app.errors import Conclusion, Outcome
from serve_app.request import DecodeGap, RequestTimes, Submission, Usage
from serve_app.serving.channel.scheduler_client import (
    ChannelRequest,
    ReplicaAddress,
    RequestOutlook,
    SchedulerClient,
)
from serve_app.serving.gateway import ApiKey, Gateway, GatewaySettings, ServedModel, UpstreamSettings
from serve_app.serving.gateway.batches.runner import CollectingExchange
from serve_app.serving.gateway.path import Request
from tests.http_server import listening

MODEL = "tiny"
TOKEN = "secret-of-the-replica"


def serving(
    app: ASGIApp | Gateway, port: int = 0, stalled_s: float | None = None
) -> contextlib.AbstractAsyncContextManager[int]:
    """Serve an engine or a gateway; yield the port."""
    return listening(app, port, stalled_s)


Answer = Callable[[Scope, dict[str, Any], Send], Awaitable[None]]


class Engine:
    """OpenAI-like engine that answers with numbered words, counts requests and can be scripted to fail.

    Attributes:
        names_responses: whether a request may choose the id of its response.
        answers: scripted answers, one per request, first to last; the default behaviour follows.
        bodies: received bodies.
        running: requests in flight.
        aborted: requests whose client disconnected before the end.
    """

    names_responses = False

    def __init__(self, *, token_delay_s: float = 0.0) -> None:
        self.token_delay_s = token_delay_s
        self.answers: deque[Answer] = deque()
        self.bodies: list[bytes] = []
        self.heads: list[dict[bytes, bytes]] = []
        self.paths: list[str] = []
        self.running = 0
        self.aborted = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        body = await _read(receive)
        self.bodies.append(body)
        self.heads.append(dict(scope["headers"]))
        self.paths.append(scope["path"])
        self.running += 1
        work = asyncio.ensure_future(self._answer(scope, body, send))
        gone = asyncio.ensure_future(_until_gone(receive))
        await asyncio.wait({work, gone}, return_when=asyncio.FIRST_COMPLETED)
        self.running -= 1
        gone.cancel()
        if not work.done():
            self.aborted += 1
            work.cancel()
            return
        work.result()

    async def _answer(self, scope: Scope, body: bytes, send: Send) -> None:
        if scope["path"].startswith("/v1/audio/"):
            usage = {"type": "duration", "seconds": 30}
            await reply_json(send, 200, {"text": "hello", "usage": usage})
            return
        parsed = json.loads(body or b"{}")
        if self.answers:
            await self.answers.popleft()(scope, parsed, send)
        elif scope["method"] == "GET":
            await reply_json(send, 200, {"version": "1"})
        elif scope["path"] == "/tokenize":
            await reply_json(send, 200, {"tokens": [1, 2, 3], "count": 3, "max_model_len": 128})
        elif scope["path"] == "/v1/embeddings":
            await self._embed(parsed, send)
        elif scope["path"] == "/v1/responses":
            await self._respond(parsed, send)
        elif parsed.get("stream"):
            await self._stream(scope, parsed, send)
        else:
            await self._whole(scope, parsed, send)

    async def _whole(self, scope: Scope, parsed: dict[str, Any], send: Send) -> None:
        count = _count(parsed)
        await asyncio.sleep(self.token_delay_s * count)
        text = " ".join(f"w{number}" for number in range(count))
        await reply_json(
            send,
            200,
            {
                "id": "x",
                "object": "chat.completion",
                "created": 1,
                "model": parsed["model"],
                "choices": [_choice(scope, text, "stop", delta=False)],
                "usage": usage_json(7, count),
            },
        )

    async def _stream(self, scope: Scope, parsed: dict[str, Any], send: Send) -> None:
        await start_stream(send)
        count = _count(parsed)
        for number in range(count):
            choice = _choice(scope, f"w{number} ", None if number + 1 < count else "stop", delta=True)
            await send_event(send, {**_chunk(parsed), "choices": [choice]})
            await asyncio.sleep(self.token_delay_s)
        if (parsed.get("stream_options") or {}).get("include_usage"):
            await send_event(send, {**_chunk(parsed), "choices": [], "usage": usage_json(7, count)})
        await send({"type": "http.response.body", "body": b"data: [DONE]\n\n", "more_body": False})

    async def _embed(self, parsed: dict[str, Any], send: Send) -> None:
        usage = {"prompt_tokens": 5, "total_tokens": 5}
        data = [{"object": "embedding", "index": 0, "embedding": [0.25, 0.5]}]
        await reply_json(
            send, 200, {"object": "list", "data": data, "model": parsed["model"], "usage": usage}
        )

    async def _respond(self, parsed: dict[str, Any], send: Send) -> None:
        usage = {
            "input_tokens": 9,
            "output_tokens": 3,
            "total_tokens": 12,
            "input_tokens_details": {"cached_tokens": 4},
            "output_tokens_details": {"reasoning_tokens": 0},
        }
        text = {"type": "output_text", "text": "w0 w1 w2", "annotations": []}
        message = {
            "type": "message",
            "id": "m",
            "role": "assistant",
            "status": "completed",
            "content": [text],
        }
        response = {
            "id": "r",
            "object": "response",
            "created_at": 1,
            "model": parsed["model"],
            "status": "completed",
            "output": [message],
            "parallel_tool_calls": False,
            "tool_choice": "auto",
            "tools": [],
            "error": None,
            "usage": usage,
        }
        if not parsed.get("stream"):
            await reply_json(send, 200, response)
            return
        await start_stream(send)
        created = {
            "type": "response.created",
            "sequence_number": 0,
            "response": {**response, "usage": None, "output": [], "status": "in_progress"},
        }
        await send_event(send, created, name="response.created")
        completed = {"type": "response.completed", "sequence_number": 1, "response": response}
        await send_event(send, completed, name="response.completed")
        await send({"type": "http.response.body", "body": b"", "more_body": False})


def usage_json(prompt: int, output: int) -> dict[str, Any]:
    return {"prompt_tokens": prompt, "completion_tokens": output, "total_tokens": prompt + output}


async def reply_json(send: Send, status: int, document: object, headers: Any = ()) -> None:
    body = json.dumps(document).encode()
    head = [
        (b"content-type", b"application/json"),
        (b"content-length", str(len(body)).encode()),
        (b"x-engine", b"yes"),
    ]
    await send({"type": "http.response.start", "status": status, "headers": [*head, *headers]})
    await send({"type": "http.response.body", "body": body})


def replies(status: int, document: object, headers: Any = ()) -> Answer:
    """Return an answer with this status and JSON document."""

    async def answer(scope: Scope, parsed: dict[str, Any], send: Send) -> None:
        await reply_json(send, status, document, headers)

    return answer


def error_json(message: str, code: int = 400, param: str | None = None) -> dict[str, Any]:
    return {"error": {"message": message, "type": "BadRequestError", "param": param, "code": code}}


async def start_stream(send: Send) -> None:
    headers = [(b"content-type", b"text/event-stream; charset=utf-8")]
    await send({"type": "http.response.start", "status": 200, "headers": headers})


async def send_event(send: Send, document: object, name: str | None = None) -> None:
    lines = f"event: {name}\n" if name else ""
    event = f"{lines}data: {json.dumps(document)}\n\n".encode()
    await send({"type": "http.response.body", "body": event, "more_body": True})


def streams(*parts: Any, ends: bytes = b"data: [DONE]\n\n") -> Answer:
    """Return an answer that streams these parts.

    Args:
        parts: documents of events, bytes, pauses in seconds, functions to await, and errors to raise.
        ends: bytes at the end.
    """

    async def answer(scope: Scope, parsed: dict[str, Any], send: Send) -> None:
        await start_stream(send)
        for part in parts:
            match part:
                case dict():
                    await send_event(send, part, name=part.get("type"))
                case bytes():
                    await send({"type": "http.response.body", "body": part, "more_body": True})
                case int() | float():
                    await asyncio.sleep(part)
                case Exception():
                    raise part
                case _:
                    await part()
        await send({"type": "http.response.body", "body": ends})

    return answer


def chunk(content: str, **more: Any) -> dict[str, Any]:
    """Return an event of a chat."""
    return {"choices": [{"index": 0, "delta": {"content": content}, **more}]}


ANTHROPIC_TEXT: tuple[dict[str, Any], ...] = (
    {"type": "content_block_start", "index": 0, "content_block": {"type": "text", "text": ""}},
    {"type": "content_block_delta", "index": 0, "delta": {"type": "text_delta", "text": "hi"}},
    {"type": "content_block_stop", "index": 0},
    {"type": "message_delta", "delta": {"stop_reason": "end_turn"}, "usage": {"output_tokens": 7}},
    {"type": "message_stop"},
)
ANTHROPIC_START: dict[str, Any] = {
    "type": "message_start",
    "message": {
        "id": "m",
        "type": "message",
        "role": "assistant",
        "model": MODEL,
        "content": [],
        "usage": {"input_tokens": 9, "output_tokens": 1, "cache_read_input_tokens": 4},
    },
}
anthropic_stream = streams(ANTHROPIC_START, *ANTHROPIC_TEXT, ends=b"")


def _count(parsed: dict[str, Any]) -> int:
    return int(parsed.get("max_tokens") or parsed.get("max_completion_tokens") or 4)


def _chunk(parsed: dict[str, Any]) -> dict[str, Any]:
    return {"id": "x", "object": "chat.completion.chunk", "created": 1, "model": parsed["model"]}


def _choice(scope: Scope, text: str, finish: str | None, *, delta: bool) -> dict[str, Any]:
    if scope["path"] == "/v1/completions":
        return {"index": 0, "text": text, "finish_reason": finish, "logprobs": None}
    part = {"role": "assistant", "content": text}
    return {"index": 0, "delta" if delta else "message": part, "finish_reason": finish}


async def _read(receive: Receive) -> bytes:
    body = bytearray()
    while True:
        message = await receive()
        body += message.get("body", b"")
        if not message.get("more_body"):
            return bytes(body)


async def _until_gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


class RawReplica:
    """Replica below HTTP: reads one request at a time and passes the socket to a script."""

    def __init__(self, script: Callable[[asyncio.StreamWriter, bytes, int], Awaitable[None]]) -> None:
        self.requests: list[bytes] = []
        self.connections = 0
        self._script = script
        self._server: asyncio.Server | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    @contextlib.asynccontextmanager
    async def listening(self) -> AsyncIterator[int]:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0, limit=2**20)
        try:
            yield self._server.sockets[0].getsockname()[1]
        finally:
            self._server.close()
            for task in self._tasks:
                task.cancel()

    def stop_listening(self) -> None:
        assert self._server is not None
        self._server.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        self.connections += 1
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                length = int(head.lower().partition(b"content-length: ")[2].partition(b"\r\n")[0] or 0)
                body = await reader.readexactly(length)
                self.requests.append(head + body)
                await self._script(writer, body, len(self.requests))
                await writer.drain()
        writer.close()


@dataclass
class FakeDispatcher:
    """Scheduler client that plays a script and records calls.

    Attributes:
        ports: replicas, by port; grants name the first.
        script: results of `submit` and `put_back`, first to last; when empty, a grant for the first replica.
        gate: requests stay queued until it is set.
        events: calls of the gateway, in order.
        engine_priority: engine priority in grants.
        is_connected: whether the scheduler is reachable; if not, no replica is known.
        scrapes: for each scrape, whether the metrics of other gateways were asked for.
        watching: queue update callbacks, by request.
        revoke: revokes the grant of the last request; None if that is not revocable.
        generated_tokens: tokens with which each put-back request continues.
        pauses_s: pause that the engine asked for, of each.
        names_responses: as in the addresses of grants.
        max_model_len: likewise.
        longest_gap: the last reported gap of a stream.
    """

    ports: list[int]
    script: deque[Conclusion | int] = field(default_factory=deque)
    gate: asyncio.Event = field(default_factory=asyncio.Event)
    events: list[tuple[Any, ...]] = field(default_factory=list)
    submissions: list[Submission] = field(default_factory=list)
    in_flight: set[str] = field(default_factory=set)
    page: str = ""
    engine_priority: int | None = None
    is_connected: bool = True
    scrapes: list[bool] = field(default_factory=list)
    watching: dict[str, Callable[[RequestOutlook | None], None]] = field(default_factory=dict)
    revoke: Callable[[], None] | None = None
    generated_tokens: list[int] = field(default_factory=list)
    pauses_s: list[float | None] = field(default_factory=list)
    names_responses: bool = False
    max_model_len: int | None = None
    longest_gap: DecodeGap | None = None
    _waits: dict[ChannelRequest, asyncio.Task[None]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.gate.set()

    def submit(self, request: ChannelRequest) -> None:
        self.submissions.append(request.submission)
        self.revoke = request.on_revocation if request.submission.revocable else None
        self.events.append(("acquire", request.submission.request_id))
        self._wait(request)

    def put_back(
        self,
        request: ChannelRequest,
        failure: DispatchFailure,
        message: str = "",
        generated_tokens: int = 0,
        retry_after_s: float | None = None,
    ) -> None:
        self.in_flight.remove(request.submission.request_id)
        self.events.append(("put_back", failure, message))
        self.pauses_s.append(retry_after_s)
        self.generated_tokens.append(generated_tokens)
        self._wait(request)

    def cancel(self, request: ChannelRequest) -> None:
        if (waiting := self._waits.pop(request, None)) is not None:
            waiting.cancel()
            self.events.append(("cancelled_in_queue",))

    def watch(self, request: ChannelRequest) -> None:
        self.watching[request.submission.request_id] = request.on_outlook

    def first_token(self, request: ChannelRequest) -> None:
        assert request.submission.request_id in self.in_flight
        self.events.append(("first_token",))

    def finish(
        self,
        request: ChannelRequest,
        outcome: Outcome,
        usage: Usage | None = None,
        times: RequestTimes | None = None,
        gap: DecodeGap | None = None,
    ) -> None:
        self.in_flight.remove(request.submission.request_id)  # raises on a second report
        self.longest_gap = gap
        self.events.append(("finished", outcome, usage))

    def note_end(self, request: ChannelRequest, outcome: Outcome, times: RequestTimes) -> None:
        assert request.submission.request_id not in self.in_flight
        assert times.engine_s is None

    def replicas(self) -> tuple[ReplicaAddress, ...]:
        return tuple(
            ReplicaAddress(replica_id=f"r{port}", pool="short", host="127.0.0.1", port=port, token=TOKEN)
            for port in self.ports
        )

    def all_replicas(self) -> tuple[ReplicaAddress, ...]:
        return self.replicas()

    def adapters(self) -> dict[str, frozenset[str]]:
        return {}

    def register_metrics(self, render: Callable[[], Awaitable[str]]) -> None:
        pass

    async def exposition(self, *, with_gateways: bool) -> str:
        self.scrapes.append(with_gateways)
        return self.page

    @property
    def waiting(self) -> int:
        """Requests that wait."""
        return len(self._waits)

    def _wait(self, request: ChannelRequest) -> None:
        self._waits[request] = asyncio.get_running_loop().create_task(self._decide(request))

    async def _decide(self, request: ChannelRequest) -> None:
        await self.gate.wait()
        del self._waits[request]
        step = self.script.popleft() if self.script else self.ports[0]
        if isinstance(step, Conclusion):
            request.on_rejection(step)
        else:
            self.in_flight.add(request.submission.request_id)
            self.grant(request, *self.granted(request.submission.request_id, step))

    def grant(self, request: ChannelRequest, dispatch: Dispatch, address: ReplicaAddress) -> None:
        """Grant a request."""
        request.on_grant(dispatch, address)

    def granted(self, request_id: str, step: int) -> tuple[Dispatch, ReplicaAddress]:
        """Return a grant of the replica at a port."""
        dispatch = Dispatch(
            request_id=request_id,
            gateway_id="g1",
            replica_id=f"r{step}",
            pool="short",
            length_queue="0-256",
            estimated_tokens=123,
            queue_wait_s=0.0125,
            engine_priority=self.engine_priority,
        )
        address = ReplicaAddress(
            replica_id=f"r{step}",
            pool="short",
            host="127.0.0.1",
            port=step,
            token=TOKEN,
            names_responses=self.names_responses,
            max_model_len=self.max_model_len,
        )
        return dispatch, address

    def put_backs(self) -> list[DispatchFailure]:
        """Return the reasons of put-backs, in order."""
        return [event[1] for event in self.events if event[0] == "put_back"]

    def names(self) -> list[str]:
        """Return the kinds of events, in order."""
        return [str(event[0]) for event in self.events]

    def outcomes(self) -> list[Outcome]:
        """Return the reported outcomes, in order."""
        return [event[1] for event in self.events if event[0] == "finished"]


def rejection(outcome: Outcome, message: str = "", retry_after_s: float | None = None) -> Conclusion:
    return Conclusion(outcome, message, retry_after_s)


@contextlib.asynccontextmanager
async def http_client(app: ASGIApp | Gateway, **options: Any) -> AsyncIterator[httpx.AsyncClient]:
    """Serve an engine or a gateway, and yield a client of it."""
    async with serving(app) as port:
        url = f"http://127.0.0.1:{port}"
        async with httpx.AsyncClient(**{"base_url": url, "timeout": 60, **options}) as http:
            yield http
    if isinstance(app, Gateway):
        app.close()


@contextlib.asynccontextmanager
async def emulated(**settings: Any) -> AsyncIterator[EmulatedEngine]:
    """Run an emulated engine of the model, which answers as vLLM does."""
    engine = EmulatedEngine(EmulatedEngineSettings(served_model_names=(MODEL,), **settings))
    await engine.start()
    try:
        yield engine
    finally:
        await engine.stop()


_numbers = itertools.count()


def gateway(dispatcher: SchedulerClient, queries: Any = None, **changes: Any) -> Gateway:
    """Build a gateway whose models have this scheduler, by default one model.

    Args:
        queries: answers admin queries of all models, or by model; None has no answers.
    """
    settings: dict[str, Any] = {
        "models": (ServedModel(name=MODEL, max_model_len=4096),),
        "upstream": UpstreamSettings(connect_timeout_s=2.0),
        **changes,
    }
    schedulers = {served.name: dispatcher for served in settings["models"]}
    seen = queries or {}
    if not isinstance(seen, Mapping):
        seen = dict.fromkeys(schedulers, queries)
    return Gateway(GatewaySettings(**settings), schedulers, f"gw{next(_numbers)}", seen)


def chat(**changes: Any) -> dict[str, Any]:
    """Return a small chat request."""
    return {"model": MODEL, "messages": [{"role": "user", "content": "hello"}], **changes}


def http_post(document: object, *lines: bytes) -> bytes:
    """Return the bytes of a chat request with these extra header lines."""
    body = json.dumps(document).encode()
    head = b"".join(b"%b\r\n" % line for line in (*lines, b"content-length: %d" % len(body)))
    return b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\n%b\r\n%b" % (head, body)


async def exchange(port: int, *sent: bytes) -> bytes:
    """Send bytes over a new connection; return everything until the server closes it."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(b"".join(sent))
    async with asyncio.timeout(20):
        answer = await reader.read()
    writer.close()
    return answer


def request_of(exchange: CollectingExchange, own_id: str = "g-1") -> Request:
    """Return a request that arrived at 0 s and is not scheduled."""
    return Request(None, exchange, own_id, 0.0)  # type: ignore[arg-type]  # only scheduled ones use services


async def call(
    app: Gateway,
    document: object = None,
    *,
    path: str = "/v1/chat/completions",
    headers: Any = (),
    exchange: CollectingExchange | None = None,
) -> CollectingExchange:
    """Call a gateway as its server does for a client that stays connected, and return its exchange.

    Args:
        document: the body of a POST request; None for a GET request.
        exchange: replaces the request.
    """
    body = None if document is None else json.dumps(document).encode()
    exchange = exchange or CollectingExchange(path, body, headers)
    app(exchange)
    try:
        await exchange.ended.wait()
    finally:
        exchange.disconnect()
    return exchange


class Answers:
    """Fake scheduler for admin queries; a name without a function has an empty answer."""

    def __init__(self, **answers: Callable[..., Awaitable[Any]]) -> None:
        self.answers = answers

    async def query(self, name: str, **arguments: Any) -> Any:
        if name in self.answers:
            return await self.answers[name](*arguments.values())
        return [] if name == "capture" else {}


@contextlib.asynccontextmanager
async def admin_client(queries: Mapping[str, Answers], **changes: Any) -> AsyncIterator[httpx.AsyncClient]:
    """Run a gateway over these schedulers; yield a client with an admin key. `k2` is another tenant's key.

    Args:
        queries: fake schedulers, by model.
    """
    keys = (ApiKey(tenant="ops", key="k1", admin=True), ApiKey(tenant="t", key="k2"))
    settings = {"models": tuple(ServedModel(name=name) for name in queries), "keys": keys, **changes}
    app = Gateway(GatewaySettings(**settings), {name: FakeDispatcher([]) for name in queries}, "gw", queries)
    headers = {"authorization": "Bearer k1"}
    async with http_client(app, headers=headers) as http:
        yield http
