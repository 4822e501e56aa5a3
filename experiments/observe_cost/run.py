"""What does a scheduler cost that only observes, and does what its twin tells then come true?

One application stands before two models. On light servers, closed loops send short streams straight to the
servers, through the application while it observes, and through it while it schedules; the three take turns.
On slow emulated engines a stream of requests passes, and the twin tells what scheduling would do. Then all
requests are scheduled, and what they waited is held against that.
"""

import json
import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

from experiments.common.application import Application, free_port, started_application
from experiments.common.experiment import Context, Experiment, Measurement
from experiments.common.light_endpoint import MODEL
from experiments.common.light_servers import role_beside_endpoints, started_light_servers
from experiments.common.processes import CpuMeter
from experiments.common.provenance import generated
from experiments.observe_cost.cost import cost_figures
from experiments.observe_cost.forecast import PACED, forecast_figures
from experiments.observe_cost.settings import ObserveCostSettings
from experiments.overhead.engine import started_engine
from serve_app.bench.connection import BenchError
from serve_app.command import progress_bar

_POLL_S = 0.2
_PATIENCE_S = 60.0


@dataclass(frozen=True, slots=True)
class _Fleet:
    """The application, and the ports of its light servers."""

    served: Application
    ports: tuple[int, ...]


def play(settings: ObserveCostSettings, context: Context) -> Iterator[Measurement]:
    """Both parts, one after the other."""
    with progress_bar("observe_cost", 2) as advance, ExitStack() as stack:
        if context.has({"part": "cost"}) and context.has({"part": "forecast"}):
            return
        fleet = _started(settings, stack)
        meter = CpuMeter((fleet.served.pid,), role_beside_endpoints)
        yield Measurement(
            key={"part": "cost"},
            figures=cost_figures(fleet.served, fleet.ports, meter, settings.cost),
            traces=generated("requests of one size"),
        )
        advance()
        yield Measurement(
            key={"part": "forecast"},
            figures=forecast_figures(fleet.served, settings.forecast),
            traces=generated(settings.forecast.trace),
        )
        advance()


def _started(settings: ObserveCostSettings, stack: ExitStack) -> _Fleet:
    light = stack.enter_context(started_light_servers())
    first = free_port() + 500
    ports = tuple(range(first, first + settings.cost.servers))
    for port in ports:
        light.tell("open", port)
    paced = settings.forecast
    engine = {"profile": paced.profile, "speed_up": paced.speed_up}
    urls = [stack.enter_context(started_engine(PACED, engine))[1] for _ in range(paced.engines)]
    models = [
        _model(MODEL, [f"http://127.0.0.1:{port}" for port in ports]),
        {**_model(PACED, urls), "tuner": _TUNER},
    ]
    served = stack.enter_context(started_application("observing", models))
    _wait_for(served, len(ports) + len(urls))
    return _Fleet(served, ports)


# The twin looks at its engines more often than in production, since a play is short. And it forecasts however
# wrong it is: on a busy machine engines stall, and in production it would tell nothing.
_CALIBRATION = {"every_s": 15.0, "max_error_ratio": 1.0}
_TUNER = {"parameters": {"rollout": {"mode": "advise"}, "advanced": {"calibration": _CALIBRATION}}}


def _model(name: str, urls: list[str]) -> dict[str, Any]:
    return {"name": name, "pools": [{"name": "all", "engine": {"remote": {"endpoints": urls}}}]}


def _wait_for(served: Application, count: int) -> None:
    deadline = time.monotonic() + _PATIENCE_S
    while time.monotonic() < deadline:
        found = json.loads(served.fetched("/admin/endpoints"))["endpoints"]
        if sum(one.get("state") == "serving" for one in found) == count:
            return
        time.sleep(_POLL_S)
    raise BenchError(f"not all of {count} endpoints serve after {_PATIENCE_S:.0f} s: {found}")


EXPERIMENT = Experiment(settings=ObserveCostSettings, play=play)
