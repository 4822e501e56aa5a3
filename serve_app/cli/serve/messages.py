"""What the host and the supervisor tell each other: one JSON object per line."""

import msgspec


class HostJob(msgspec.Struct, kw_only=True, frozen=True):
    """What the host is started with.

    Attributes:
        config: path of the configuration.
        folder: where everything of this instance lies: Ray's files, logs.
        address: of a Ray cluster that runs already; None starts one on this machine.
        dashboard: also start Ray's dashboard.
        engines: the kind of engine (`vllm`, `emulated`, `remote`) of each pool's deployment.
    """

    config: str
    folder: str
    url: str
    address: str | None = None
    dashboard: bool = False
    engines: dict[str, str] = {}


class StepBegun(msgspec.Struct, tag=True, frozen=True):
    """The start has come to this step."""

    name: str


class Progress(msgspec.Struct, tag=True, frozen=True):
    """How far the deployments are.

    Attributes:
        lines: one for each deployment that is not ready, such as `long 0/1 starting`.
        ready: names of deployments that are.
    """

    ready: list[str]
    lines: list[str]


class Ready(msgspec.Struct, tag=True, frozen=True):
    """Requests are answered.

    Attributes:
        dashboard: the address of Ray's dashboard, where it runs.
    """

    dashboard: str | None = None


class Failed(msgspec.Struct, tag=True, frozen=True):
    """The start has failed, or the application cannot go on: one paragraph."""

    reason: str


class Draining(msgspec.Struct, tag=True, frozen=True):
    """Open answers that are awaited, and how long at most."""

    open_requests: int
    left_s: float


class Drained(msgspec.Struct, tag=True, frozen=True):
    """Nothing is open any more.

    Attributes:
        cut: answers that were ended with an error, because the time was over.
    """

    cut: int


HostMessage = StepBegun | Progress | Ready | Failed | Draining | Drained


class Stop(msgspec.Struct, frozen=True):
    """The supervisor's one order: refuse new requests, let open ones end, then end.

    Attributes:
        drain_s: how long open answers may go on.
        retry_after_s: what refused clients are told.
    """

    drain_s: float
    retry_after_s: float
