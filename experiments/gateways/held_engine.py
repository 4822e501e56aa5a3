"""An engine that answers only when it is told to, so that whatever else comes has to wait.

It tells its load as vLLM does: every request that it holds waits. Lines on the standard input:

    answer        the oldest request that is held; printed are the seconds until another one has come

The answer says when it was written, on a clock that all processes of a machine share.
"""

import asyncio
import sys
import time
from collections import deque

import uvloop

MODEL = "held"
_CONTEXT_TOKENS = 32_768
_HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
_PATIENCE_S = 30.0


class _Held:
    """The requests that wait for an answer."""

    def __init__(self) -> None:
        self.waiting: deque[_Connection] = deque()
        self.came = asyncio.Event()
        self.came_at = 0.0

    def add(self, connection: "_Connection") -> None:
        self.came_at = time.monotonic()
        self.waiting.append(connection)
        self.came.set()

    async def answer(self) -> float:
        """Seconds until the next one came."""
        self.came.clear()
        answered_at = time.monotonic()
        self.waiting.popleft().stream()
        async with asyncio.timeout(_PATIENCE_S):
            await self.came.wait()
        return self.came_at - answered_at

    def page(self) -> bytes:
        """A page of metrics."""
        lines = [
            f'{name}{{engine="0",model_name="{MODEL}"}} {value}'
            for name, value in (
                ("vllm:num_requests_running", 0),
                ("vllm:num_requests_waiting", len(self.waiting)),
                ("vllm:kv_cache_usage_perc", 0.1),
            )
        ]
        cache = 'vllm:cache_config_info{block_size="16",engine="0",num_gpu_blocks="1000000"} 1.0'
        return "\n".join((*lines, cache, "")).encode()


class _Connection(asyncio.Protocol):
    def __init__(self, held: _Held) -> None:
        self._held = held
        self._received = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport: asyncio.Transport = transport  # type: ignore[assignment]  # it can write

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002 - the loop passes it
        if self in self._held.waiting:
            self._held.waiting.remove(self)

    def data_received(self, data: bytes) -> None:
        self._received += data
        head, mark, body = self._received.partition(b"\r\n\r\n")
        if not mark or len(body) < _content_length(head):
            return
        self._received = b""
        path = head.split(b" ", 2)[1]
        if head.startswith(b"POST "):
            self._held.add(self)
        elif path == b"/metrics":
            self._whole(self._held.page())
        elif path == b"/v1/models":
            self._whole(
                b'{"object":"list","data":[{"id":"held","object":"model","owned_by":"vllm","max_model_len":%d}]}'
                % _CONTEXT_TOKENS
            )
        else:
            self._whole(b"{}")

    def stream(self) -> None:
        opening = b'{"id":"c","object":"chat.completion.chunk","created":1,"model":"held",'
        content = b"%.9f" % time.monotonic()
        first = b'"choices":[{"index":0,"delta":{"content":"%b"},"finish_reason":"length"}]}' % content
        usage = b'"choices":[],"usage":{"prompt_tokens":10,"completion_tokens":1,"total_tokens":11}}'
        events = (opening + first, opening + usage, b"[DONE]")
        self._transport.write(_HEAD + b"".join(map(_event, events)) + b"0\r\n\r\n")

    def _whole(self, body: bytes) -> None:
        head = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n" % len(body)
        self._transport.write(head + body)


def _event(data: bytes) -> bytes:
    event = b"data: %b\n\n" % data
    return b"%x\r\n%b\r\n" % (len(event), event)


def _content_length(head: bytes) -> int:
    for line in head.lower().split(b"\r\n"):
        if line.startswith(b"content-length:"):
            return int(line[15:])
    return 0


async def _serve(port: int) -> None:
    loop = asyncio.get_running_loop()
    reader = asyncio.StreamReader()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    held = _Held()
    await loop.create_server(lambda: _Connection(held), "127.0.0.1", port)
    print(port, flush=True)
    while await reader.readline():
        print(await held.answer(), flush=True)


if __name__ == "__main__":
    uvloop.run(_serve(int(sys.argv[1])))
