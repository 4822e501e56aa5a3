"""The interface of an engine: an OpenAI-compatible ASGI app with a life cycle, limits and a load."""

from collections.abc import Awaitable, Callable, Iterable, MutableMapping
from dataclasses import dataclass
from typing import Any, Protocol

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
ASGIApp = Callable[[Scope, Receive, Send], Awaitable[None]]


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineLimits:
    """The capacity of an engine.

    Attributes:
        max_model_len: context limit, prompt and output together, in tokens.
        kv_tokens: capacity of the KV cache, in tokens.
        max_num_seqs: most sequences in its batch.
        tpot_s: time per output token with a full batch, where that is known before anything is served.
        prefill_token_s: seconds to compute one prompt token, likewise.
        max_num_batched_tokens: most tokens that it computes in one iteration; None where it does not say.
        long_prefill_token_threshold: most of one prompt in an iteration, 0 for no limit; likewise.
    """

    max_model_len: int
    kv_tokens: int
    max_num_seqs: int
    tpot_s: float | None = None
    prefill_token_s: float | None = None
    max_num_batched_tokens: int | None = None
    long_prefill_token_threshold: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineLoad:
    """The present load of an engine.

    Attributes:
        waiting: requests in the engine's own queue.
        running: sequences in its batch.
        kv_usage_ratio: share of KV blocks in use, 0 to 1.
        tpot_s: mean time per output token over about the last two seconds; None when nothing was generated.
        adapters: names of the LoRA adapters that it lists.
    """

    waiting: int
    running: int
    kv_usage_ratio: float
    tpot_s: float | None = None
    adapters: tuple[str, ...] = ()


class Engine(Protocol):
    """One engine, hosted by one pool replica.

    `start` is awaited once before anything else and returns the limits; `app` serves requests after that, and
    is given HTTP scopes only. `load` is cheap: it is called about five times a second. `check_health` raises
    `EngineError` when the engine cannot serve. `stop` frees everything, after the last request has ended.
    """

    async def start(self) -> EngineLimits:
        """Bring the engine up; seconds to minutes."""
        ...

    @property
    def app(self) -> ASGIApp:
        """The OpenAI-compatible ASGI app, once started."""
        ...

    async def load(self) -> EngineLoad:
        """The present load."""
        ...

    async def check_health(self) -> None:
        """Return when the engine can serve; raise `EngineError` when it cannot."""
        ...

    async def stop(self) -> None:
        """Free everything."""
        ...


class EngineSettings(Protocol):
    """Settings of an engine that a pool replica hosts; each kind of engine has a class of them."""

    def check(self) -> None:
        """Raise `SettingsError` where the engine is installed here and refuses these settings."""
        ...

    def make(self) -> Engine:
        """Return the engine, not started yet."""
        ...


# Reading requests and sending responses in ASGI, for the engines' apps and the guard in front of them.


Headers = Iterable[tuple[bytes, bytes]]


def require_http(scope: Scope) -> None:
    """Raise unless the scope is HTTP: the replica's server sends neither lifespan events nor websockets."""
    if scope["type"] != "http":
        raise RuntimeError(f"an engine serves HTTP only, got {scope['type']}")


async def read_body(receive: Receive) -> bytes | None:
    """The whole body, whose size the gateway has checked; None when the client leaves before its end."""
    parts: list[bytes] = []
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            return None
        parts.append(message.get("body", b""))
        if not message.get("more_body", False):
            return b"".join(parts)


async def wait_for_disconnect(receive: Receive) -> None:
    """Return when the client has disconnected, or the response has ended."""
    while (await receive())["type"] != "http.disconnect":
        pass


async def send_response(
    send: Send,
    status: int,
    body: bytes,
    content_type: bytes = b"application/json",
    more_headers: Headers = (),
) -> None:
    """Send a whole response."""
    headers = [
        (b"content-type", content_type),
        (b"content-length", b"%d" % len(body)),
        *more_headers,
    ]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
