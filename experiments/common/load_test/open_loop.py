"""Open-loop load generator: sends requests at the times in the trace, whatever the endpoint does.

A client that waits for responses before it sends more requests hides the queue that it should measure. So
arrivals follow the schedule, latencies count from the schedule, and each record has the client's own delay.
Every request is sent, and ends in exactly one record.

Request bodies have text of the right size, made without a tokenizer. The text consists of common words and
has five bytes per token, as with current tokenizers, so that a gateway that estimates tokens from bytes has
realistic input. No two prompts have the same beginning, unless the trace has a shared prefix. Bodies are
concatenated from bytes; no JSON is encoded when a request is sent.
"""

import asyncio
import enum
import json
import time
from collections.abc import Mapping, Sequence
from typing import Annotated

import aiohttp
import numpy as np
import uvloop

from experiments.common.errors import ExperimentError
from experiments.common.load_test.response import ResponseParser
from serve_app.core.metrics.record import RequestRecord
from serve_app.core.settings_base import NOT_NEGATIVE, settings
from serve_app.errors import Outcome
from serve_app.lab.workloads import PREFIX_BLOCK_TOKENS, Trace, TraceRequest, stream
from serve_app.request import PriorityClass

WORDS = " ".join(
    (
        "the of and to in a is that for it as was with be by on not he his but at are this have from or had",
        "an they which one you were all her she there would their we him been has when who will no more if",
        "out so up said what its about than into them can only other time new some could these two may",
        "first then do any like my now over such our man even most made after also did many before must",
        "through years where much your way well down should because long each just state people those too",
        "little good world make very year still see own work men day get here between both life being under",
        "never same another know while last might us great old off come since go against right came take",
        "used himself few house use place during high without again home around small however found part",
        "once general school every question number system water family different company public service",
        "market history morning language",
    )
).split()
"""Common words."""
_TEXT_BYTES = 1 << 20
_BYTES_PER_TOKEN = 5


class BodyKind(enum.StrEnum):
    """Kind of body: how an engine receives the token counts of a request."""

    EMULATED = "emulated"
    """By the extra fields of emulated engines: exact counts, independent of the text."""
    TEXT = "text"
    """By the text itself and `max_tokens`, for real engines."""


class ApiEndpoint(enum.StrEnum):
    """Endpoint of the OpenAI API."""

    CHAT = "/v1/chat/completions"
    COMPLETIONS = "/v1/completions"


@settings
class BodySettings:
    """Settings of request bodies and headers.

    Attributes:
        max_tokens: limit in the request; None for the true length of the output, 0 for no limit.
        ignore_eos: request outputs of exactly `max_tokens` from a real engine (an extension of vLLM).
    """

    model: str
    kind: BodyKind = BodyKind.EMULATED
    endpoint: ApiEndpoint = ApiEndpoint.CHAT
    max_tokens: Annotated[int | None, NOT_NEGATIVE.hint("0 means no limit")] = None
    ignore_eos: bool = False

    def __post_init__(self) -> None:
        if self.ignore_eos and self.kind is BodyKind.EMULATED:
            raise ValueError(
                "ignore_eos is for real engines (body kind text), "
                "because emulated ones generate exact lengths"
            )


# Chunks must arrive as the engine has written them.
HEADERS = {"Content-Type": "application/json", "Accept-Encoding": "identity"}


class BodyFactory:
    """Factory of bodies and headers."""

    def __init__(self, settings: BodySettings) -> None:
        self._settings = settings
        self._text = _words(_TEXT_BYTES)
        opening: dict[str, object] = {"model": settings.model, "stream": True}
        opening |= {"stream_options": {"include_usage": True}}
        if settings.ignore_eos:
            opening |= {"ignore_eos": True}
        chat = settings.endpoint is ApiEndpoint.CHAT
        self._opening = json.dumps(opening).encode()[:-1]
        self._before_text = b',"messages":[{"role":"user","content":"' if chat else b',"prompt":"'
        self._after_text = b'"}]}' if chat else b'"}'

    @property
    def path(self) -> str:
        """Path of the requests, which begins with `/v1`."""
        return self._settings.endpoint

    def body(self, number: int, request: TraceRequest) -> bytes:
        """Return the body of the `number`-th trace request."""
        text = self.text(number, request)
        return b"".join((self._opening, self._limits(request), self._before_text, text, self._after_text))

    def headers(self, number: int, request: TraceRequest) -> dict[str, str]:
        """Return the headers of the `number`-th trace request."""
        headers = {**HEADERS, "x-request-id": f"bench-{number}"}
        if request.tenant != "default":
            headers["x-tenant"] = request.tenant
        if request.priority is not PriorityClass.DEFAULT:
            headers["x-priority"] = request.priority
        return headers

    def text(self, number: int, request: TraceRequest) -> bytes:
        """Return the prompt: the shared blocks according to the trace, then unique words."""
        wanted = request.prompt_tokens * _BYTES_PER_TOKEN
        block_bytes = PREFIX_BLOCK_TOKENS * _BYTES_PER_TOKEN
        shared = b"".join(self._slice(block, block_bytes) for block in request.prefix)[:wanted]
        own = wanted - len(shared)
        return shared + (_name(number) + self._slice(number, own))[:own] if own > 0 else shared

    def _limits(self, request: TraceRequest) -> bytes:
        limit = request.output_tokens if self._settings.max_tokens is None else self._settings.max_tokens
        stated = b',"max_tokens":%d' % limit if limit else b""
        if self._settings.kind is BodyKind.TEXT:
            return stated
        stated += b',"ewsjf_output_tokens":%d' % request.output_tokens
        # A prompt of stated length does not use the prefix cache, so one with a shared prefix states none.
        return stated if request.prefix else stated + b',"ewsjf_prompt_tokens":%d' % request.prompt_tokens

    def _slice(self, number: int, length: int) -> bytes:
        """Return words from a different position per number. The stride is prime to the text's length."""
        start = number * 7919 % len(self._text)
        piece = self._text[start : start + length]
        while len(piece) < length:
            piece += self._text[: length - len(piece)]
        return piece


def _name(number: int) -> bytes:
    """Return words that are unique to a number, so that prompts do not share their first block."""
    words = []
    for _ in range(4):
        number, index = divmod(number, len(WORDS))
        words.append(WORDS[index])
    return " ".join(words).encode() + b" "


def _words(length: int) -> bytes:
    drawn = stream(0, "filler text").choice(np.array(WORDS), length // 4)
    return " ".join(drawn.tolist()).encode()[:length]


LATE_AFTER_S = 0.05
"""Delay behind the schedule from which a request counts as sent late."""


# Below the keep-alive timeouts of common servers (uvicorn 5 s, nginx 75 s): a request on a connection that is
# being closed would fail without a fault of the endpoint.
_IDLE_LIMIT_S = 2.0
_CONNECT_TIMEOUT_S = 10.0


class OpenLoop:
    """Sender of one trace to one endpoint.

    Args:
        url: of the endpoint, before `/v1`.
        timeout_s: maximum time from sending to the end of a response, after which the client disconnects.
    """

    def __init__(self, url: str, bodies: BodyFactory, timeout_s: float = 600.0) -> None:
        self.url = url
        self.bodies = bodies
        self.timeout_s = timeout_s
        self._records: list[RequestRecord] = []

    async def run(self, trace: Trace) -> list[RequestRecord]:
        """Send every request of `trace` at its time; return the records in the order of their ends."""
        async with client_session() as session, asyncio.TaskGroup() as sending:
            start = time.monotonic() - trace.requests[0].arrival_s
            for number, request in enumerate(trace.requests):
                due = start + request.arrival_s
                await asyncio.sleep(max(due - time.monotonic(), 0))
                sending.create_task(self._send(session, number, request, due))
        return self._records

    async def _send(
        self, session: aiohttp.ClientSession, number: int, request: TraceRequest, due: float
    ) -> None:
        now = time.monotonic()
        parser = ResponseParser()
        try:
            async with asyncio.timeout(self.timeout_s):
                await self._exchange(session, number, request, parser)
        except TimeoutError:
            detail = f"the client timed out after {self.timeout_s:g} s"
            parser.fail(detail, time.monotonic(), Outcome.CANCELLED)
        # A timer may fire slightly early. A request never counts as sent before its time.
        self._records.append(_record(parser, number, request, due, max(now, due)))

    async def _exchange(
        self, session: aiohttp.ClientSession, number: int, request: TraceRequest, parser: ResponseParser
    ) -> None:
        body, headers = self.bodies.body(number, request), self.bodies.headers(number, request)
        await exchange(session, f"{self.url}{self.bodies.path}", body, headers, parser)


async def exchange(
    session: aiohttp.ClientSession, url: str, body: bytes, headers: Mapping[str, str], parser: ResponseParser
) -> None:
    """Send one request, and parse its response as it arrives. A failure ends the parser's response."""
    try:
        async with session.post(url, data=body, headers=headers) as response:
            parser.status, parser.headers = response.status, response.headers
            async for piece in response.content.iter_any():
                parser.on_body(piece, time.monotonic())
            parser.on_complete(time.monotonic())
    except (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError) as error:
        parser.fail(f"cannot connect: {error}", time.monotonic())
    except aiohttp.ClientError as error:
        parser.fail(f"the response is not complete: {error or type(error).__name__}", time.monotonic())
    except ValueError as error:
        parser.fail(f"the request cannot be sent: {error}", time.monotonic())


def client_session() -> aiohttp.ClientSession:
    """Open a session with any number of connections."""
    connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=_IDLE_LIMIT_S)
    return aiohttp.ClientSession(
        connector=connector, timeout=aiohttp.ClientTimeout(sock_connect=_CONNECT_TIMEOUT_S)
    )


def _record(
    parser: ResponseParser, number: int, request: TraceRequest, due: float, sent_at: float
) -> RequestRecord:
    counted = request.output_tokens if parser.outcome is Outcome.COMPLETED else 0
    return RequestRecord(
        request_id=f"bench-{number}",
        arrived_at=due,
        sent_at=sent_at,
        first_token_at=parser.first_token_at,
        finished_at=parser.finished_at,
        outcome=parser.outcome or Outcome.FAILED,
        prompt_tokens=parser.prompt_tokens or request.prompt_tokens,
        output_tokens=counted if parser.output_tokens is None else parser.output_tokens,
        tenant=request.tenant,
        priority=request.priority,
        detail=parser.detail,
    )


def play_trace(url: str, bodies: BodySettings, trace: Trace) -> list[RequestRecord]:
    """Play all requests to their end."""
    return uvloop.run(OpenLoop(url, BodyFactory(bodies)).run(trace))


def all_completed(records: Sequence[RequestRecord]) -> Sequence[RequestRecord]:
    """Return the same records.

    Raises:
        ExperimentError: a request did not complete.
    """
    failed = [record for record in records if not record.completed]
    if failed:
        raise ExperimentError(f"{len(failed)} requests did not complete, the first: {failed[0].detail}")
    return records
