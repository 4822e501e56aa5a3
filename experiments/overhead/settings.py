"""What is played."""

from collections.abc import Mapping
from typing import Annotated, Any

from serve_app.settings_base import NOT_NEGATIVE, POSITIVE, at_least, settings


@settings
class RequestKind:
    """One kind of request.

    Attributes:
        body_bytes: of the prompt.
        chunks: of the stream that answers; 0 asks for a whole answer of one token.
        pace_ms: between two chunks.
        shared: prompts have all but their last words in common, so that prefix affinity finds them.
        clients: that send one request after the other, for each of these a row.
    """

    body_bytes: Annotated[int, at_least(10)] = 100
    chunks: Annotated[int, NOT_NEGATIVE] = 0
    pace_ms: Annotated[float, NOT_NEGATIVE] = 0.0
    shared: bool = False
    clients: tuple[Annotated[int, at_least(1)], ...] = (1, 16)

    @property
    def tokens(self) -> int:
        """That a request asks for: one in each chunk."""
        return max(1, self.chunks)


@settings
class ReplicaSettings:
    """The second setting: an application with a replica of its own, beside its engine alone.

    Attributes:
        engine, engine_advanced: of both, an emulated one.
        kinds: that are played there.
    """

    engine: Mapping[str, Any]
    engine_advanced: Mapping[str, Any]
    kinds: tuple[str, ...]


@settings
class QuickStartSettings:
    """What `configs/local.yaml` takes while nobody asks anything of it.

    Attributes:
        starts: of the application, one after the other.
        settle_s: after a start, before idle use is measured for `idle_s`.
    """

    starts: Annotated[int, NOT_NEGATIVE]
    settle_s: Annotated[float, NOT_NEGATIVE]
    idle_s: Annotated[float, POSITIVE]


@settings
class OverheadSettings:
    """All of it.

    Attributes:
        label: tells rows of one state of the code from those of another; empty for the tables of today.
        systems: before the light engines, in this order; what the machine lacks is left out with a word.
        kinds: names in `requests` that are played there.
        requests: every kind by its name.
        rounds: in each, all systems take turns, and another one is first.
        seconds: of each turn.
        idle_s: in each round, for how long the use of idle processes is measured.
        warm_up_s: for each system and kind, before anything is measured.
    """

    systems: tuple[str, ...]
    kinds: tuple[str, ...]
    requests: Mapping[str, RequestKind]
    rounds: Annotated[int, at_least(1)]
    seconds: Annotated[float, POSITIVE]
    idle_s: Annotated[float, POSITIVE]
    warm_up_s: Annotated[float, POSITIVE]
    replicas: ReplicaSettings
    quick_start: QuickStartSettings
    label: str = ""
