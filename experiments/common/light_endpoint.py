"""Light endpoints in a process of their own: they tell their load as vLLM does, and stream short answers.

Lines on the standard input open and close ports: `open 9001`, `close 9001`.
"""

import asyncio
import sys
from functools import partial

import uvloop

MODEL = "light"
_TOKENS, _TOKEN_S = 8, 0.002
_MODELS = b'{"data":[{"id":"light","object":"model","owned_by":"vllm","max_model_len":32768}]}'
_STREAM_HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
# A page of vLLM has about so many bytes; nearly all of them are buckets of histograms.
_PAGE_BYTES = 55_000


def page_with(running: int, steps: int) -> bytes:
    """A page of metrics."""
    labels = '{engine="0",model_name="light"}'
    wanted = {
        "vllm:num_requests_running": running,
        "vllm:num_requests_waiting": 0,
        "vllm:kv_cache_usage_perc": 0.1,
        "vllm:iteration_tokens_total_count": steps,
        "vllm:inter_token_latency_seconds_sum": steps * _TOKEN_S,
        "vllm:inter_token_latency_seconds_count": steps,
    }
    lines = [f"# TYPE {name} gauge\n{name}{labels} {value}" for name, value in wanted.items()]
    cache = 'vllm:cache_config_info{block_size="16",engine="0",num_gpu_blocks="100000"} 1.0'
    return "\n".join([_BUCKETS, *lines, f"# TYPE vllm:cache_config_info gauge\n{cache}", ""]).encode()


def _buckets() -> str:
    lines, length = ["# TYPE vllm:request_time_per_output_token_seconds histogram"], 0
    while length < _PAGE_BYTES:
        name = "vllm:request_time_per_output_token_seconds_bucket"
        lines.append(f'{name}{{engine="0",le="{len(lines)}.0",model_name="light"}} {len(lines)}.0')
        length += len(lines[-1])
    return "\n".join(lines)


_BUCKETS = _buckets()


class _Endpoint:
    """One endpoint: a port, and what runs there."""

    def __init__(self) -> None:
        self.running = 0
        self.steps = 0
        self.connections: set[_Connection] = set()


class _Connection(asyncio.Protocol):
    """One client of an endpoint; requests come one after the other."""

    def __init__(self, endpoint: _Endpoint) -> None:
        self._endpoint = endpoint
        self._transport: asyncio.Transport | None = None
        self._data = b""
        self._left = 0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport  # type: ignore[assignment]  # it can write
        self._endpoint.connections.add(self)

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002 - the loop passes it
        self._endpoint.connections.discard(self)
        self._endpoint.running -= self._left > 0
        self._left = 0

    def close(self) -> None:
        assert self._transport is not None
        self._transport.abort()

    def data_received(self, data: bytes) -> None:
        self._data += data
        head, mark, body = self._data.partition(b"\r\n\r\n")
        if not mark:
            return
        length = next(
            (int(line[15:]) for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:")), 0
        )
        if len(body) < length:
            return
        self._data = b""
        if head.startswith(b"POST "):
            assert self._transport is not None
            self._endpoint.running += 1
            self._left = _TOKENS
            self._transport.write(_STREAM_HEAD)
            self._token()
        elif b" /metrics " in head:
            self._answer(page_with(self._endpoint.running, self._endpoint.steps))
        elif b" /v1/models " in head:
            self._answer(_MODELS)
        else:
            self._answer(b"{}", b"404 Not Found")

    def _answer(self, body: bytes, status: bytes = b"200 OK") -> None:
        assert self._transport is not None
        self._transport.write(b"HTTP/1.1 %s\r\ncontent-length: %d\r\n\r\n" % (status, len(body)) + body)

    def _token(self) -> None:
        if not self._left or self._transport is None or self._transport.is_closing():
            return
        self._left -= 1
        self._endpoint.steps += 1
        finish = "null" if self._left else '"length"'
        event = (
            '{"id":"x","object":"text_completion","created":1,"model":"light","choices":[{"index":0,'
            f'"text":" w","logprobs":null,"finish_reason":{finish}}}]}}'
        )
        self._event(event)
        if self._left:
            asyncio.get_running_loop().call_later(_TOKEN_S, self._token)
            return
        usage = '"usage":{"prompt_tokens":20,"completion_tokens":8,"total_tokens":28}'
        self._event(
            f'{{"id":"x","object":"text_completion","created":1,"model":"light","choices":[],{usage}}}'
        )
        self._event("[DONE]")
        self._transport.write(b"0\r\n\r\n")
        self._endpoint.running -= 1

    def _event(self, data: str) -> None:
        assert self._transport is not None
        event = f"data: {data}\n\n".encode()
        self._transport.write(b"%x\r\n%s\r\n" % (len(event), event))


async def _serve() -> None:
    loop = asyncio.get_running_loop()
    reader = asyncio.StreamReader()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    servers: dict[int, tuple[asyncio.Server, _Endpoint]] = {}
    while line := await reader.readline():
        verb, port = line.decode().split()
        if verb == "open":
            endpoint = _Endpoint()
            server = await loop.create_server(partial(_Connection, endpoint), "127.0.0.1", int(port))
            servers[int(port)] = (server, endpoint)
        else:
            server, endpoint = servers.pop(int(port))
            server.close()
            for connection in tuple(endpoint.connections):
                connection.close()
        print(line.decode().strip(), flush=True)


if __name__ == "__main__":
    uvloop.run(_serve())
