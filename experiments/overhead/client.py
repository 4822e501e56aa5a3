"""Cheap client in a separate process: each connection sends the next request after the last answer.

Each line on standard input is a `Load` in JSON, and each line of output a `Played`. It parses no HTTP beyond
the head: the length or the last chunk ends an answer.
"""

import asyncio
import json
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from typing import Any
from urllib.parse import urlsplit

import numpy as np
import uvloop

from experiments.common.errors import ExperimentError
from experiments.common.light_endpoint import MODEL, content_length
from experiments.common.load_test.open_loop import BodyFactory, BodySettings
from experiments.common.peers import System
from experiments.common.processes import answer_of, started_module
from experiments.overhead.system import RequestKind
from serve_app.lab.workloads import TraceRequest

_ANSWER_TIMEOUT_S = 60.0
_END = b"0\r\n\r\n"
_TAIL_BYTES = 64
_DIGITS = 10


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """Load of a client.

    Attributes:
        url: target.
        body_bytes: of the prompt.
        shared: prompts differ only in their last words; otherwise every prompt begins differently.
        tokens: requested output tokens.
        seconds: span in which requests start.
        tenants: number of keys that requests use in turn.
        sessions: number of session ids that requests have in turn; 0 for requests without one.
    """

    url: str
    body_bytes: int
    shared: bool
    stream: bool
    tokens: int
    clients: int
    seconds: float
    tenants: int = 1
    sessions: int = 0


def key_of(tenant: int) -> str:
    """Return the key of a tenant, by its number."""
    return f"overhead-bench-key-{tenant:016}"


def load_of(kind: RequestKind, system: System, clients: int, seconds: float) -> Load:
    """Return requests of a kind for light engines behind a system."""
    return Load(
        url=system.url,
        body_bytes=kind.body_bytes,
        shared=kind.shared,
        stream=kind.chunks > 0,
        tokens=kind.tokens,
        clients=clients,
        seconds=seconds,
        tenants=system.tenants,
        sessions=system.sessions,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Played:
    """Results of a load.

    Attributes:
        seconds: until the last answer.
        first_p50_ms: to the first byte of the body; without a stream, to the whole answer.
        error: of the first request with a wrong answer; empty if all were right.
    """

    requests: int = 0
    seconds: float = 0.0
    first_p50_ms: float = 0.0
    first_p99_ms: float = 0.0
    error: str = ""


class Client:
    """Handle of the client's process."""

    def __init__(self, process: "subprocess.Popen[str]") -> None:
        self._process = process

    def play(self, load: Load) -> Played:
        """Send this load, and wait for its end.

        Raises:
            ExperimentError: an answer was wrong.
        """
        played = Played(**json.loads(answer_of(self._process, json.dumps(asdict(load)))))
        if played.error:
            raise ExperimentError(f"{load.url}: {played.error}")
        return played


@contextmanager
def started_client() -> Iterator[Client]:
    """Start the process; it ends with the block."""
    with started_module("experiments.overhead.client") as process:
        yield Client(process)


@dataclass(slots=True)
class Run:
    """One load in progress.

    Attributes:
        opening: the request's bytes before the headers that differ.
        before, after: the following bytes, around the request's number.
        ended: set when the last connection has ended.
    """

    load: Load
    opening: bytes
    before: bytes
    after: bytes
    until: float
    ended: asyncio.Event
    open: int = 0
    sent: int = 0
    last_at: float = 0.0
    error: str = ""
    firsts: list[float] = field(default_factory=list)

    def played(self, began: float) -> Played:
        """Return the results of a load that began then."""
        if self.error or not self.firsts:
            return Played(error=self.error or "no request was answered")
        p50, p99 = 1_000 * np.percentile(self.firsts, (50, 99))
        return Played(
            requests=len(self.firsts),
            seconds=self.last_at - began,
            first_p50_ms=float(p50),
            first_p99_ms=float(p99),
        )


class Connection(asyncio.Protocol):
    """One connection; it sends a request when it is open, and after each answer."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self._transport: asyncio.Transport | None = None
        self._begin()

    def _begin(self) -> None:
        self._head = b""
        self._in_body = False
        # None if the last chunk ends the body.
        self._missing: int | None = None
        self._tail = b""
        self._first_at = 0.0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Send the first request."""
        self._transport = transport  # type: ignore[assignment]  # it can write
        self._run.open += 1
        self.send()

    def connection_lost(self, exc: Exception | None) -> None:
        """Record an error if the load has not ended."""
        run = self._run
        if time.perf_counter() < run.until and not run.error:
            run.error = f"the connection was closed ({exc or 'end of stream'})"
        run.open -= 1
        if not run.open:
            run.ended.set()

    def data_received(self, data: bytes) -> None:
        """Record the first bytes of a body and the end of an answer."""
        if not self._in_body:
            self._head += data
            head, mark, data = self._head.partition(b"\r\n\r\n")
            if not mark:
                return
            if b" 200 " not in head[:16]:
                self._fail(self._head[:300].decode("latin-1"))
                return
            self._in_body = True
            self._missing = content_length(head)
        if data and not self._first_at:
            self._first_at = time.perf_counter()
        if self._missing is not None:
            self._missing -= len(data)
            if self._missing <= 0:
                self._end()
            return
        self._tail = (self._tail + data)[-_TAIL_BYTES:]
        if self._tail.endswith(_END):
            if b"[DONE]" in self._tail:
                self._end()
            else:
                self._fail(f"a stream without its end: {self._tail!r}")

    def send(self) -> None:
        """Send the next request."""
        run = self._run
        assert self._transport is not None
        run.sent += 1
        self._sent_at = time.perf_counter()
        headers = _headers(run.load, run.sent)
        self._transport.writelines((run.opening, headers, run.before, b"%010d" % run.sent, run.after))

    def _end(self) -> None:
        run = self._run
        now = run.last_at = time.perf_counter()
        run.firsts.append((self._first_at if run.load.stream else now) - self._sent_at)
        self._begin()
        self.proceed(now)

    def proceed(self, now: float) -> None:
        """Send the next request, or close the connection at the end."""
        if now < self._run.until and not self._run.error:
            self.send()
        else:
            self.close()

    def close(self) -> None:
        """Close the connection."""
        assert self._transport is not None
        self._transport.close()

    def _fail(self, error: str) -> None:
        self._run.error = self._run.error or error
        assert self._transport is not None
        self._transport.abort()


def _headers(load: Load, number: int) -> bytes:
    """Return the header lines of one request."""
    lines = f"Authorization: Bearer {key_of(number % load.tenants)}\r\n"
    if load.sessions:
        lines += f"x-session-id: session-{number % load.sessions:06}\r\n"
    return lines.encode()


def parts_of(load: Load) -> tuple[bytes, bytes, bytes]:
    """Return the bytes before the headers that differ, and around the ten digits of the number."""
    text = _text(max(_DIGITS, load.body_bytes))
    # Position at which prompts differ: at the beginning or at the end.
    at = len(text) - _DIGITS if load.shared else 0
    document: dict[str, Any] = {"model": MODEL, "max_tokens": load.tokens}
    if load.stream:
        document["stream"] = True
    opening = json.dumps(document)[:-1] + ', "messages": [{"role": "user", "content": "'
    closing = b'"}]}'
    target = urlsplit(load.url)
    head = (
        f"POST {target.path}/v1/chat/completions HTTP/1.1\r\nHost: {target.netloc}\r\nAccept: */*\r\n"
        "Content-Type: application/json\r\n"
    )
    length = f"Content-Length: {len(opening) + len(text) + len(closing)}\r\n\r\n{opening}"
    return head.encode(), length.encode() + text[:at], text[at + _DIGITS :] + closing


def _text(length: int) -> bytes:
    words = BodyFactory(BodySettings(model="")).text
    prompt = TraceRequest(arrival_s=0.0, prompt_tokens=length, output_tokens=1)
    return words(1, prompt)[:length]


async def _play(load: Load) -> Played:
    loop = asyncio.get_running_loop()
    parts = parts_of(load)
    began = time.perf_counter()
    run = Run(load, *parts, began + load.seconds, asyncio.Event())
    target = urlsplit(load.url)
    assert target.hostname is not None
    assert target.port is not None
    try:
        for _ in range(load.clients):
            await loop.create_connection(lambda: Connection(run), target.hostname, target.port)
        async with asyncio.timeout(load.seconds + _ANSWER_TIMEOUT_S):
            await run.ended.wait()
    except (OSError, TimeoutError) as error:
        run.error = run.error or f"{type(error).__name__}: {error}"
    return run.played(began)


def _main() -> None:
    for line in sys.stdin:
        print(json.dumps(asdict(uvloop.run(_play(Load(**json.loads(line)))))), flush=True)


if __name__ == "__main__":
    _main()
