"""Messages between host and supervisor: one JSON object per line."""

import msgspec


class HostJob(msgspec.Struct, kw_only=True, frozen=True):
    """Start arguments of the host.

    Attributes:
        folder: folder for all files of this instance: Ray's files, logs.
        address: address of a running Ray cluster; None to start one on this machine.
        port: the application's port, instead of the configuration's.
        engines: kind of engine, such as `vllm`, by deployment of a pool.
    """

    config: str
    folder: str
    url: str
    address: str | None = None
    port: int | None = None
    dashboard: bool = False
    engines: dict[str, str] = {}


class StepBegun(msgspec.Struct, tag=True, frozen=True):
    """A step of the start has begun."""

    name: str


class Progress(msgspec.Struct, tag=True, frozen=True):
    """Progress of the deployments.

    Attributes:
        lines: one per deployment that is not ready, such as `long 0/1 starting`.
        ready: names of the ready deployments.
    """

    ready: list[str]
    lines: list[str]


class Ready(msgspec.Struct, tag=True, frozen=True):
    """The application is ready for requests.

    Attributes:
        ray_address: address of its Ray cluster.
        dashboard: address of Ray's dashboard, if it runs.
        models_without_server: models of which discovery has found no server so far.
    """

    ray_address: str
    dashboard: str | None = None
    models_without_server: list[str] = []


class Failed(msgspec.Struct, tag=True, frozen=True):
    """The start has failed, or the application cannot continue.

    Attributes:
        reason: one paragraph.
        is_transient: whether a second attempt may succeed.
    """

    reason: str
    is_transient: bool = False


class Draining(msgspec.Struct, tag=True, frozen=True):
    """Number of in-flight requests during a drain, and the time left."""

    open_requests: int
    remaining_s: float


class Drained(msgspec.Struct, tag=True, frozen=True):
    """The drain is complete. `aborted` requests ended with an error at the deadline."""

    aborted: int


HostMessage = StepBegun | Progress | Ready | Failed | Draining | Drained


class Stop(msgspec.Struct, frozen=True):
    """The supervisor's only command: reject new requests, complete in-flight ones, then exit.

    Attributes:
        drain_s: time limit for in-flight requests.
        retry_after_s: `Retry-After` of rejected requests.
    """

    drain_s: float
    retry_after_s: float
