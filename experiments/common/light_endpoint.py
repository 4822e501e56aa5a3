"""Light endpoints in a separate process: report load as vLLM does, and answer at almost no cost.

Lines on standard input open and close ports and set the answers:

    open PORT CONTEXT         serves there; CONTEXT is the context limit in tokens
    answer CHUNKS PACE_MS     streams of this many chunks, one per pace; 0 chunks for a whole answer

Chunks without a pace are written one by one, as fast as the loop runs. With a pace, one tick writes the next
chunk of every stream, as an engine step does.
"""

import asyncio
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

import uvloop

from experiments.common.processes import answer_of, started_module

MODEL = "light"
_CHUNKS, _PACE_MS = 8, 2.0
# Bytes of body per token, as common tokenizers have for a client's words.
_BYTES_PER_TOKEN = 5
_STREAM_HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
_OPENING = b'{"id":"chatcmpl-light","object":"chat.completion.chunk","created":1,"model":"light",'
# Approximate size of vLLM's page; nearly all of it is histogram buckets.
_PAGE_BYTES = 55_000


@dataclass
class LightServers:
    """Parent's handle of the endpoints' process."""

    process: "subprocess.Popen[str]"

    def tell(self, verb: str, *values: float) -> None:
        """Send one of the lines above, and wait until it is executed."""
        answer_of(self.process, " ".join(map(str, (verb, *values))))


@contextmanager
def started_light_servers() -> Iterator[LightServers]:
    """Start the process without endpoints; it ends with the block."""
    with started_module("experiments.common.light_endpoint") as process:
        yield LightServers(process)


def page_with(running: int, steps: int) -> bytes:
    """Return a metrics page."""
    labels = '{engine="0",model_name="light"}'
    wanted = {
        "vllm:num_requests_running": running,
        "vllm:num_requests_waiting": 0,
        "vllm:kv_cache_usage_perc": 0.1,
        "vllm:iteration_tokens_total_count": steps,
        "vllm:inter_token_latency_seconds_sum": steps * _PACE_MS / 1_000,
        "vllm:inter_token_latency_seconds_count": steps,
    }
    lines = [f"# TYPE {name} gauge\n{name}{labels} {value}" for name, value in wanted.items()]
    cache = 'vllm:cache_config_info{block_size="16",engine="0",num_gpu_blocks="1000000"} 1.0'
    return "\n".join([_BUCKETS, *lines, f"# TYPE vllm:cache_config_info gauge\n{cache}", ""]).encode()


def _buckets() -> str:
    lines, length = ["# TYPE vllm:request_time_per_output_token_seconds histogram"], 0
    while length < _PAGE_BYTES:
        name = "vllm:request_time_per_output_token_seconds_bucket"
        lines.append(f'{name}{{engine="0",le="{len(lines)}.0",model_name="light"}} {len(lines)}.0')
        length += len(lines[-1])
    return "\n".join(lines)


def _event(data: bytes) -> bytes:
    event = b"data: %s\n\n" % data
    return b"%x\r\n%s\r\n" % (len(event), event)


_BUCKETS = _buckets()
_CHUNK = _event(
    _OPENING + b'"choices":[{"index":0,"delta":{"content":" w"},"logprobs":null,"finish_reason":null}]}'
)
_LAST_CHUNK = _event(
    _OPENING + b'"choices":[{"index":0,"delta":{"content":" w"},"logprobs":null,"finish_reason":"length"}]}'
)
_DONE = _event(b"[DONE]") + b"0\r\n\r\n"


class _Answers:
    """The current answer, and the clock of paced streams."""

    def __init__(self) -> None:
        self.chunks = _CHUNKS
        self.pace_s = _PACE_MS / 1_000
        self._loop = asyncio.get_running_loop()
        self._waiting: list[Callable[[], None]] = []

    def next(self, write: Callable[[], None]) -> None:
        """Write a stream's next chunk when it is due."""
        if not self.pace_s:
            self._loop.call_soon(write)
            return
        if not self._waiting:
            self._loop.call_later(self.pace_s, self._tick)
        self._waiting.append(write)

    def _tick(self) -> None:
        waiting, self._waiting = self._waiting, []
        for write in waiting:
            write()


class _Endpoint:
    """One endpoint: a port and its running requests."""

    def __init__(self, answers: _Answers, context_tokens: int) -> None:
        self.answers = answers
        self.models = (
            b'{"object":"list","data":[{"id":"light","object":"model","owned_by":"vllm","max_model_len":%d}]}'
            % context_tokens
        )
        self.running = 0
        self.steps = 0


class _Connection(asyncio.Protocol):
    """One client connection; its requests arrive one after another."""

    def __init__(self, endpoint: _Endpoint) -> None:
        self._endpoint = endpoint
        self._transport: asyncio.Transport | None = None
        self._head = b""
        # Length of the current body, and the bytes still to come. They are counted and dropped.
        self._length = 0
        self._missing = 0
        self._left = 0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport  # type: ignore[assignment]  # it can write

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002 - the loop passes it
        self._endpoint.running -= self._left > 0
        self._left = 0

    def data_received(self, data: bytes) -> None:
        if self._missing:
            self._missing -= len(data)
        else:
            head, mark, body = (self._head + data).partition(b"\r\n\r\n")
            if not mark:
                self._head = head
                return
            self._head = head
            self._length = content_length(head) or 0
            self._missing = self._length - len(body)
        if not self._missing:
            head, self._head = self._head, b""
            self._answer(head)

    def _answer(self, head: bytes) -> None:
        path = head.split(b" ", 2)[1]
        if path == b"/v1/traces":
            # An endpoint is also a collector of OpenTelemetry, which discards everything.
            self._whole(b"{}")
        elif head.startswith(b"POST ") and path.startswith(b"/v1/"):
            self._generate()
        elif path == b"/metrics":
            self._whole(page_with(self._endpoint.running, self._endpoint.steps))
        elif path == b"/v1/models":
            self._whole(self._endpoint.models)
        elif path == b"/health":
            self._whole(b"{}")
        else:
            self._whole(b"{}", b"404 Not Found")

    def _generate(self) -> None:
        chunks = self._endpoint.answers.chunks
        if chunks:
            assert self._transport is not None
            self._endpoint.running += 1
            self._left = chunks
            self._transport.write(_STREAM_HEAD)
            self._chunk()
            return
        self._endpoint.steps += 1
        message = b'{"role":"assistant","content":"w"},"logprobs":null,"finish_reason":"length"'
        self._whole(
            b'{"id":"chatcmpl-light","object":"chat.completion","created":1,"model":"light","choices":'
            b'[{"index":0,"message":%s}],%s}' % (message, self._usage(1))
        )

    def _whole(self, body: bytes, status: bytes = b"200 OK") -> None:
        assert self._transport is not None
        self._transport.write(
            b"HTTP/1.1 %s\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n%s"
            % (status, len(body), body)
        )

    def _chunk(self) -> None:
        if not self._left or self._transport is None or self._transport.is_closing():
            return
        self._left -= 1
        self._endpoint.steps += 1
        if self._left:
            self._transport.write(_CHUNK)
            self._endpoint.answers.next(self._chunk)
            return
        usage = _event(_OPENING + b'"choices":[],%s}' % self._usage(self._endpoint.answers.chunks))
        self._transport.write(_LAST_CHUNK + usage + _DONE)
        self._endpoint.running -= 1

    def _usage(self, output_tokens: int) -> bytes:
        prompt_tokens = self._length // _BYTES_PER_TOKEN
        counts = (prompt_tokens, output_tokens, prompt_tokens + output_tokens)
        return b'"usage":{"prompt_tokens":%d,"completion_tokens":%d,"total_tokens":%d}' % counts


def content_length(head: bytes) -> int | None:
    """Return the body length from a message's head; None if the head does not state it."""
    for line in head.lower().split(b"\r\n"):
        if line.startswith(b"content-length:"):
            return int(line[15:])
    return None


async def _serve() -> None:
    loop = asyncio.get_running_loop()
    reader = asyncio.StreamReader()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    servers: list[asyncio.Server] = []
    answers = _Answers()
    while line := await reader.readline():
        match line.decode().split():
            case ["answer", chunks, pace_ms]:
                answers.chunks, answers.pace_s = int(chunks), float(pace_ms) / 1_000
            case ["open", port, context]:
                connection = partial(_Connection, _Endpoint(answers, int(context)))
                servers.append(await loop.create_server(connection, "127.0.0.1", int(port)))
        print(line.decode().strip(), flush=True)


if __name__ == "__main__":
    uvloop.run(_serve())
