"""HTTP server on a real socket whose answers are scripted byte by byte."""

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

Script = Callable[[asyncio.StreamWriter], Awaitable[None]]
"""Answers one request; returns when the connection may be reused."""


def event(document: object) -> bytes:
    return b"data: " + json.dumps(document).encode() + b"\n\n"


def role_event() -> bytes:
    return event({"choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}}]})


def token_event(text: str = "word ") -> bytes:
    return event({"choices": [{"index": 0, "delta": {"content": text}}]})


def usage_event(prompt_tokens: int = 20, output_tokens: int = 3) -> bytes:
    usage = {"prompt_tokens": prompt_tokens, "completion_tokens": output_tokens}
    return event({"choices": [], "usage": usage})


DONE = b"data: [DONE]\n\n"


def stream_of(prompt_tokens: int = 20, output_tokens: int = 3) -> list[bytes]:
    tokens = [token_event() for _ in range(output_tokens)]
    return [role_event(), *tokens, usage_event(prompt_tokens, output_tokens), DONE]


def streaming(pieces: Sequence[bytes], *, headers: bytes = b"", end: bytes = b"0\r\n\r\n") -> Script:
    async def answer(writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n" + headers + b"\r\n")
        for piece in pieces:
            writer.write(b"%x\r\n%s\r\n" % (len(piece), piece))
            await writer.drain()
        writer.write(end)

    return answer


def document(status: int, body: object) -> Script:
    async def answer(writer: asyncio.StreamWriter) -> None:
        encoded = json.dumps(body).encode()
        writer.write(b"HTTP/1.1 %d X\r\ncontent-length: %d\r\n\r\n%s" % (status, len(encoded), encoded))

    return answer


def raw(data: bytes) -> Script:
    async def answer(writer: asyncio.StreamWriter) -> None:
        writer.write(data)

    return answer


def then_closed(script: Script) -> Script:
    async def answer(writer: asyncio.StreamWriter) -> None:
        await script(writer)
        await writer.drain()
        writer.close()

    return answer


async def silence(writer: asyncio.StreamWriter) -> None:
    await asyncio.sleep(3600)


@dataclass
class ScriptedServer:
    """Server that answers the n-th request with the n-th script; the last one serves all further requests.

    Attributes:
        get: answers every GET.
    """

    scripts: list[Script]
    heads: list[bytes] = field(default_factory=list)
    bodies: list[bytes] = field(default_factory=list)
    connections: int = 0
    port: int = 0
    get: Script = silence

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        try:
            while not writer.is_closing():
                head = await reader.readuntil(b"\r\n\r\n")
                if head.startswith(b"GET "):
                    await self.get(writer)
                    continue
                length = int(head.lower().split(b"content-length: ")[1].split(b"\r\n")[0])
                self.bodies.append(await reader.readexactly(length))
                self.heads.append(head)
                await self.scripts[min(len(self.heads), len(self.scripts)) - 1](writer)
                await writer.drain()
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()


@asynccontextmanager
async def scripted(*scripts: Script) -> AsyncIterator[ScriptedServer]:
    server = ScriptedServer(list(scripts))
    tasks: set[asyncio.Task[None]] = set()

    def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        tasks.add(asyncio.ensure_future(server.serve(reader, writer)))

    listening = await asyncio.start_server(accept, "127.0.0.1", 0)
    server.port = listening.sockets[0].getsockname()[1]
    try:
        yield server
    finally:
        listening.close()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
