"""The reading of one body by a gateway's own reader, and its stages one by one, in CPU time."""

import time
from collections.abc import Awaitable, Callable, Mapping
from typing import cast

from experiments.bodies.kinds import body_of
from serve_app.engines.engine import Message
from serve_app.request import PriorityClass
from serve_app.serving.channel.scheduler_client import ReplicaAddress, SchedulerClient
from serve_app.serving.gateway.answer.client_stream import ClientStream, StallWatch
from serve_app.serving.gateway.keys.settings import ApiKey
from serve_app.serving.gateway.request.incoming import IncomingRequest
from serve_app.serving.gateway.request.prefix import prefix_hashes
from serve_app.serving.gateway.request.reader import RequestReader
from serve_app.serving.gateway.request.served_models import ServedModels
from serve_app.serving.gateway.request.structure import check_structure
from serve_app.serving.gateway.routes.table import SCHEDULED
from serve_app.serving.gateway.settings import GatewaySettings, ServedModel

_KEY = "a-key-of-an-experiment"
# uvicorn hands on what it has as soon as that is more than this.
_PIECE_BYTES = 64 * 1024
# A measurement of less than this says more of the clock than of the code.
_LEAST_S = 0.002


class _NoScheduler:
    """Knows no replica and no adapter; nothing is dispatched here."""

    def replicas(self) -> tuple[ReplicaAddress, ...]:
        """None."""
        return ()

    def adapters(self) -> Mapping[str, frozenset[str]]:
        """None."""
        return {}


class Reading:
    """One kind of body, as it arrives at a gateway that asks for keys and hashes prefixes.

    Args:
        kind: of `kinds`.
        size: of the body in bytes, about.
    """

    def __init__(self, kind: str, size: int) -> None:
        self.path, self.body = body_of(kind, size)
        key = ApiKey(tenant="a", key=_KEY, default_class=PriorityClass.INTERACTIVE)
        model = ServedModel(name="m")
        scheduler = cast("SchedulerClient", _NoScheduler())
        settings = GatewaySettings(models=(model,), keys=(key,))
        self._reader = RequestReader(settings, ServedModels((model,), {"m": scheduler}), "gateway")
        self._pieces = [
            self.body[start : start + _PIECE_BYTES] for start in range(0, len(self.body), _PIECE_BYTES)
        ]

    async def costs_us(self, rounds: int) -> dict[str, list[float]]:
        """Microseconds of CPU of each stage, and of all together, in so many rounds.

        Stages and the whole take turns, so that all meet the same machine.
        """
        stages = self._stages()
        counts = {name: await _calls_for(stage) for name, stage in stages.items()}
        costs: dict[str, list[float]] = {name: [] for name in stages}
        for _ in range(rounds):
            for name, stage in stages.items():
                costs[name].append(await _cpu_s(stage, counts[name]) / counts[name] * 1e6)
        self._reader.close()
        return costs

    def _stages(self) -> dict[str, Callable[[], Awaitable[None]]]:
        body, parse = self.body, SCHEDULED[self.path].parse
        opening = parse(body).opening

        async def whole() -> None:
            job = await self._reader.job(self._incoming())
            job.body.release()

        async def receive() -> None:
            held = await self._reader.body(self._incoming())
            held.release()

        async def check() -> None:
            check_structure(body)

        async def parsing() -> None:
            parse(body)

        async def hashing() -> None:
            prefix_hashes(opening, model="m")

        return {"receive": receive, "check": check, "parse": parsing, "hash": hashing, "all": whole}

    def _incoming(self) -> IncomingRequest:
        headers = [
            (b"host", b"127.0.0.1:8000"),
            (b"content-type", b"application/json"),
            (b"content-length", b"%d" % len(self.body)),
            (b"authorization", b"Bearer " + _KEY.encode()),
            (b"user-agent", b"OpenAI/Python 2.0"),
            (b"accept", b"application/json"),
        ]
        scope = {"type": "http", "method": "POST", "path": self.path, "headers": headers}
        left = iter(self._pieces)
        count = len(self._pieces)

        async def receive() -> Message:
            nonlocal count
            count -= 1
            return {"type": "http.request", "body": next(left), "more_body": count > 0}

        return self._reader.incoming(
            scope, receive, ClientStream(_send, StallWatch(1.0), None), self.path, 0.0
        )


async def _send(message: Message) -> None:
    raise AssertionError(f"nothing is answered here: {message}")


async def _cpu_s(stage: Callable[[], Awaitable[None]], calls: int) -> float:
    """CPU time of all threads."""
    began = time.process_time()
    for _ in range(calls):
        await stage()
    return time.process_time() - began


async def _calls_for(stage: Callable[[], Awaitable[None]]) -> int:
    """How many calls make a round long enough."""
    await stage()
    calls = 1
    while await _cpu_s(stage, calls) < _LEAST_S:
        calls *= 2
    return calls
