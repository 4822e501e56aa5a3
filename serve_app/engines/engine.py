"""Interface of an engine: an OpenAI-compatible ASGI app with a life cycle, limits and a load.

`HangWatch` detects engines that have requests but compute nothing. A hung or stopped process (SIGSTOP) is
still alive, so it fails no liveness check. Its frontend is a separate process and continues to report the
load of the last step.
"""

from collections.abc import Awaitable, Callable, Hashable, Iterable, Mapping, MutableMapping
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
ASGIApp = Callable[[Scope, Receive, Send], Awaitable[None]]


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineLimits:
    """Capacity of an engine.

    Attributes:
        max_model_len: context limit, prompt and output together, in tokens.
        kv_tokens: capacity of the KV cache, in tokens.
        max_num_seqs: maximum number of sequences in a batch.
        tpot_s: time per output token with a full batch; None if unknown before requests were served.
        prefill_token_s: seconds to compute one prompt token; None as for `tpot_s`.
        max_num_batched_tokens: maximum tokens per iteration; None if not reported.
        long_prefill_token_threshold: maximum tokens of one prompt per iteration, 0 for no limit; None if not
            reported.
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
    """Current load of an engine.

    Attributes:
        waiting: requests in the engine's internal queue.
        running: sequences in the batch.
        kv_usage_ratio: share of KV blocks in use, 0 to 1.
        tpot_s: mean time per output token over about the last two seconds; None if no tokens were generated.
        adapters: names of the loaded LoRA adapters.
    """

    waiting: int
    running: int
    kv_usage_ratio: float
    tpot_s: float | None = None
    adapters: tuple[str, ...] = ()


class Engine(Protocol):
    """An engine hosted by one pool replica.

    `start` is awaited once, before any other call. Afterwards `app` serves requests; it receives HTTP scopes
    only. `load` must be cheap because the replica calls it about five times per second. `stop` is called
    after the last request has ended.
    """

    async def start(self) -> EngineLimits:
        """Start the engine and return its limits. Takes seconds to minutes."""
        ...

    @property
    def app(self) -> ASGIApp:
        """The OpenAI-compatible ASGI app. Available after `start`."""
        ...

    async def load(self) -> EngineLoad:
        """Return the current load."""
        ...

    async def check_health(self) -> None:
        """Raise `EngineError` if the engine cannot serve requests."""
        ...

    async def stop(self) -> None:
        """Release all resources."""
        ...


class PoolEngineSettings(Protocol):
    """Settings of the engines of a pool, hosted or remote; one class for each kind."""

    @property
    def served_model_names(self) -> tuple[str, ...] | None:
        """Model names that clients may use; None for those of the application's model."""
        ...

    @property
    def context_limit(self) -> int | None:
        """Context limit in tokens; None if only the running engine can report it."""
        ...

    @property
    def schedules_by_priority(self) -> bool | None:
        """True if the engine orders its queue by request priority; None if only the engine knows."""
        ...


class EngineSettings(PoolEngineSettings, Protocol):
    """Settings of an engine that a pool replica hosts.

    Attributes:
        PRIORITY_SETTING: path of the setting that decides on `schedules_by_priority`.
    """

    PRIORITY_SETTING: ClassVar[str]

    def batch_limits(self) -> Mapping[str, Any]:
        """Return what the engine model needs to simulate it, by vLLM's argument; None if not set."""
        ...

    @property
    def simulated_profile(self) -> str | None:
        """Engine profile with which a simulation begins; None if the settings state none."""
        ...

    def check(self) -> None:
        """Raise `SettingsError` if the engine is installed on this machine and rejects the settings."""
        ...

    def make(self) -> Engine:
        """Return a new engine that has not been started."""
        ...


# -- ASGI helpers for the engines' apps and for the replica's guard in front of them -----------------------


Headers = Iterable[tuple[bytes, bytes]]


def require_http(scope: Scope) -> None:
    """Raise unless the scope is HTTP. The replica's server sends neither lifespan events nor websockets."""
    if scope["type"] != "http":
        raise RuntimeError(f"an engine serves HTTP only, got {scope['type']}")


async def read_body(receive: Receive) -> bytes | None:
    """Return the whole body, or None if the client disconnects first. The gateway has checked its size."""
    parts: list[bytes] = []
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            return None
        parts.append(message.get("body", b""))
        if not message.get("more_body", False):
            return b"".join(parts)


async def wait_for_disconnect(receive: Receive) -> None:
    """Wait until the client has disconnected or the response has ended."""
    while (await receive())["type"] != "http.disconnect":
        pass


async def send_response(
    send: Send,
    status: int,
    body: bytes,
    content_type: bytes = b"application/json",
    more_headers: Headers = (),
) -> None:
    """Send a complete response."""
    headers = [
        (b"content-type", content_type),
        (b"content-length", b"%d" % len(body)),
        *more_headers,
    ]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})


# Limit on the time that one check adds: after a longer gap, the observer itself was busy or suspended.
_MAX_GAP_S = 5.0


class HangWatch:
    """Stopwatch for the time that an engine has had requests without making progress."""

    def __init__(self) -> None:
        self._progress: Hashable = None
        self._checked_at = float("-inf")
        self._hanging_s = 0.0

    def __repr__(self) -> str:
        return f"<HangWatch hanging_s={self._hanging_s:.1f}>"

    def update(self, progress: Hashable, *, busy: bool, now: float) -> float:
        """Record the state of the engine and return for how many seconds it has been hanging.

        Call this a few times per second.

        Args:
            progress: a value that changes with each step of the engine.
        """
        if busy and progress == self._progress:
            self._hanging_s += min(now - self._checked_at, _MAX_GAP_S)
        else:
            self._progress, self._hanging_s = progress, 0.0
        self._checked_at = now
        return self._hanging_s
