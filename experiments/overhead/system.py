"""Settings, and the systems between client and engines."""

import contextlib
from collections.abc import Iterator, Mapping
from typing import Annotated

from experiments.common.light_endpoint import LightServers, started_light_servers
from experiments.common.peers import Endpoints, next_port
from serve_app.core.settings_base import NOT_NEGATIVE, POSITIVE, at_least, settings


@settings
class RequestKind:
    """One kind of request.

    Attributes:
        body_bytes: of the prompt.
        chunks: of the streamed answer; 0 requests a whole answer of one token.
        pace_ms: between two chunks.
        shared: prompts differ only in their last words, so that prefix affinity applies.
        clients: numbers of clients that each send one request after another, with a row for each number.
    """

    body_bytes: Annotated[int, at_least(10)] = 100
    chunks: Annotated[int, NOT_NEGATIVE] = 0
    pace_ms: Annotated[float, NOT_NEGATIVE] = 0.0
    shared: bool = False
    clients: tuple[Annotated[int, at_least(1)], ...] = (1, 16)

    @property
    def tokens(self) -> int:
        """Return the requested tokens: one per chunk."""
        return max(1, self.chunks)


@settings
class QuickStartSettings:
    """Settings of the idle measurement of `configs/local.yaml`.

    Attributes:
        starts: number of successive starts.
        settle_s: pause after a start, before idle use is measured for `idle_s`.
    """

    starts: Annotated[int, NOT_NEGATIVE]
    settle_s: Annotated[float, NOT_NEGATIVE]
    idle_s: Annotated[float, POSITIVE]


@settings
class TurnSettings:
    """Settings of the turns that systems take.

    Attributes:
        requests: every kind by its name.
        rounds: in each, all systems take turns, with another one first.
        seconds: of each turn.
        idle_s: span in each round in which idle use is measured.
        warm_up_s: for each system and kind, before any measurement.
    """

    requests: Mapping[str, RequestKind]
    rounds: Annotated[int, at_least(1)]
    seconds: Annotated[float, POSITIVE]
    idle_s: Annotated[float, POSITIVE]
    warm_up_s: Annotated[float, POSITIVE]


@settings
class OverheadSettings(TurnSettings):
    """Settings of the experiment.

    Attributes:
        systems: in front of the light engines, in this order; missing ones are skipped with a message.
        kinds: names in `requests` that are measured there.
    """

    systems: tuple[str, ...]
    kinds: tuple[str, ...]
    quick_start: QuickStartSettings


DIRECT, OURS = "direct", "ours"
_SHORT_CONTEXT, _LONG_CONTEXT = 8_192, 4_000_000


@contextlib.contextmanager
def started_light_engines() -> Iterator[tuple[LightServers, Endpoints]]:
    """Start two light engines in one process: with a short and a long context."""
    with started_light_servers() as light:
        endpoints = Endpoints((next_port(), next_port()))
        for port, context_tokens in zip(endpoints.ports, (_SHORT_CONTEXT, _LONG_CONTEXT), strict=True):
            light.tell("open", port, context_tokens)
        yield light, endpoints
