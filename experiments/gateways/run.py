"""What do more gateways cost and carry, and what do ten thousand waiting streams take in one?

An application with one, two and four gateways gets the same requests from a cheap client, before two light
engines. The gateways share the application's address. CPU time is read from the processes, less what they use
when idle in the same round. Then one gateway gets streams that all have to wait: memory by role, and how soon
one goes on when a place is free.
"""

import resource
import time
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

from experiments.common.application import served_application
from experiments.common.config import read_settings
from experiments.common.experiment import Context, Experiment, Measurement
from experiments.common.light_endpoint import MODEL
from experiments.common.light_servers import role_beside_endpoints
from experiments.common.processes import CpuMeter
from experiments.common.provenance import generated
from experiments.gateways.waiting import waiting_figures
from experiments.overhead.client import started_client
from experiments.overhead.ours import application, remote_model
from experiments.overhead.run import Player, Sample, figures_of
from experiments.overhead.settings import OverheadSettings, RequestKind
from experiments.overhead.system import OURS, System, started_light_engines
from serve_app.settings_base import NOT_NEGATIVE, POSITIVE, at_least, settings

_OVERHEAD = Path(__file__).parents[1] / "overhead" / "config.yaml"
_START_TIMEOUT_S = 600.0
_SETTLE_S = 4.0
# Of the gateway and of the client, besides the streams.
_OTHER_FILES = 500


@settings
class GatewaysSettings:
    """What is played.

    Attributes:
        gateways: numbers of them, each with an application of its own.
        kinds: names in `requests` that are played there, by so many `clients` at once.
        rounds: of all kinds and clients in turn.
        seconds: of each turn.
        idle_s: in each round, for how long the use of idle processes is measured.
        warm_up_s: for each kind, before anything is measured.
        waiting: numbers of streams that wait in one gateway, the fewest first.
        opened_per_s: of these streams.
        wakes: that are measured for each number, one in `wake_every_s`.
    """

    gateways: tuple[Annotated[int, at_least(1)], ...]
    kinds: tuple[str, ...]
    clients: tuple[Annotated[int, at_least(1)], ...]
    requests: Mapping[str, RequestKind]
    rounds: Annotated[int, at_least(1)]
    seconds: Annotated[float, POSITIVE]
    idle_s: Annotated[float, POSITIVE]
    warm_up_s: Annotated[float, POSITIVE]
    waiting: tuple[Annotated[int, at_least(1)], ...]
    opened_per_s: Annotated[float, POSITIVE]
    wakes: Annotated[int, at_least(1)]
    wake_every_s: Annotated[float, NOT_NEGATIVE]


def play(settings: GatewaysSettings, context: Context) -> Iterator[Measurement]:
    """One application after the other, then the streams that wait."""
    for gateways in settings.gateways:
        if not all(context.has(_key(gateways, *cell)) for cell in _cells(settings)):
            yield from _costs(settings, gateways)
    if not all(context.has({"waiting": number}) for number in settings.waiting):
        found = waiting_figures(
            settings.waiting, settings.opened_per_s, settings.wakes, settings.wake_every_s
        )
        for number, figures in found:
            yield Measurement(
                key={"waiting": number}, figures=figures, traces=generated("requests of one size")
            )


def _costs(settings: GatewaysSettings, gateways: int) -> Iterator[Measurement]:
    for (name, clients), found in _samples(settings, gateways).items():
        yield Measurement(
            key=_key(gateways, name, clients),
            figures=figures_of(found[OURS]),
            traces=generated("requests of one size"),
        )


def _samples(settings: GatewaysSettings, gateways: int) -> dict[tuple[str, int], dict[str, list[Sample]]]:
    requests = {name: replace(settings.requests[name], clients=settings.clients) for name in settings.kinds}
    played = replace(
        read_settings(_OVERHEAD, OverheadSettings),
        requests=requests,
        rounds=settings.rounds,
        seconds=settings.seconds,
        idle_s=settings.idle_s,
        warm_up_s=settings.warm_up_s,
    )
    with started_client() as client, started_light_engines() as (light, endpoints):
        config = application(remote_model(endpoints))
        config["applications"][0]["args"]["gateways"]["replicas"] = gateways
        with served_application(config, start_timeout_s=_START_TIMEOUT_S) as served:
            # Connections to the engines, and what starts beside the first requests.
            time.sleep(_SETTLE_S)
            systems = [System(OURS, served.url, CpuMeter((served.pid,), role_beside_endpoints))]
            return Player(played, client, systems, MODEL, light).samples(settings.kinds)


def _cells(settings: GatewaysSettings) -> list[tuple[str, int]]:
    return [(name, clients) for name in settings.kinds for clients in settings.clients]


def _key(gateways: int, name: str, clients: int) -> dict[str, Any]:
    return {"gateways": gateways, "kind": name, "clients": clients}


def _unavailable() -> str | None:
    settings = read_settings(Path(__file__).with_name("config.yaml"), GatewaysSettings)
    wanted, (_, limit) = max(settings.waiting) + _OTHER_FILES, resource.getrlimit(resource.RLIMIT_NOFILE)
    if limit == resource.RLIM_INFINITY or wanted <= limit:
        return None
    return f"a process may have {limit:,} open files, and {wanted:,} are needed: raise it with ulimit -n"


EXPERIMENT = Experiment(settings=GatewaysSettings, play=play, unavailable=_unavailable)
