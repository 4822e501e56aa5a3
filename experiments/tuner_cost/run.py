"""What does a search of the tuner cost a served application, in CPU and in latency?

Traffic has a steady rate that two emulated engines carry without a queue, in slices: idle, working, working,
idle, and so on. In an idle slice the tuner is frozen and its last search is over; in a working one it
searches continuously. Both sides have the same processes, connections and reports, and the slices of a pair
get the same traffic.
"""

import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from experiments.common.application import Application, serve_config, served_application
from experiments.common.errors import ExperimentError
from experiments.common.experiment import Context, Experiment, Measurement
from experiments.common.load_test.open_loop import BodySettings, play_trace
from experiments.common.processes import CpuMeter
from experiments.common.provenance import generated
from serve_app.cli.command import progress_bar
from serve_app.core.metrics.record import RequestRecord
from serve_app.core.metrics.summary import percentile
from serve_app.core.settings_base import as_config, settings
from serve_app.lab.workloads.catalog import WorkloadSettings, resolve
from serve_app.tuning.settings import TunerSettings

ROLES = ("tuner", "scheduler", "gateway")
_TRACE = "paper-mix"
_MODEL = "tuned"
_MIN_REQUESTS = 100
# Below the first share of a core the tuner only collects records; above the second, it searches.
_IDLE, _BUSY = 0.06, 0.12
_LOOK_S = 2.0
_TURN_LIMIT_S = 120.0
# The gateway's log may be written a moment later.
_LOG_DELAY_S = 1.0


@settings
class TunerCostSettings:
    """Settings of the experiment.

    Attributes:
        pairs: of an idle and a working slice.
        core_share: of a core that the search may use.
    """

    pairs: int
    slice_s: float
    rate_per_s: float
    core_share: float


Slice = Mapping[str, float]


@dataclass(frozen=True, slots=True)
class Player:
    """Runs slices against the application."""

    settings: TunerCostSettings
    served: Application

    def warm_up(self) -> None:
        """Send the requests that the tuner needs before it can draw windows."""
        self._play(seed=0, seconds=max(10.0, 3.0 * _MIN_REQUESTS / self.settings.rate_per_s))

    def turn(self, *, working: bool) -> None:
        """Start or stop the tuner's search.

        Raises:
            ExperimentError: it does not start or stop.
        """
        self.served.fetched(f"/debug/tuner/{'thaw' if working else 'freeze'}", post=True)
        meter, deadline = CpuMeter((self.served.pid,)), time.monotonic() + _TURN_LIMIT_S
        while time.monotonic() < deadline:
            before, began = meter.read(), time.monotonic()
            time.sleep(_LOOK_S)
            share = (meter.read()["tuner"] - before["tuner"]) / (time.monotonic() - began)
            if (share >= _BUSY) if working else (share <= _IDLE):
                return
        raise ExperimentError(
            f"the tuner did not {'begin' if working else 'end'} to search in {_TURN_LIMIT_S:g} s"
        )

    def slice(self, seed: int) -> Slice:
        """Send the traffic of a slice; return what it took."""
        meter = CpuMeter((self.served.pid,))
        logged, before, began = len(self.served.log_lines("gateway")), meter.read(), time.monotonic()
        records = self._play(seed, self.settings.slice_s)
        seconds, after = time.monotonic() - began, meter.read()
        time.sleep(_LOG_DELAY_S)
        grants_ms = sorted(waits_ms(self.served.log_lines("gateway")[logged:]))
        ttfts_ms = sorted(1_000 * record.ttft_s for record in records if record.ttft_s is not None)
        if not grants_ms or not ttfts_ms:
            raise ExperimentError(
                f"a slice had {len(grants_ms)} grants in the log, and {len(ttfts_ms)} answers"
            )
        return {
            "requests": len(records),
            "completed": sum(record.completed for record in records),
            "grant_mean_ms": statistics.fmean(grants_ms),
            "grant_p50_ms": percentile(grants_ms, 50),
            "grant_p99_ms": percentile(grants_ms, 99),
            "ttft_p50_ms": percentile(ttfts_ms, 50),
            "ttft_p99_ms": percentile(ttfts_ms, 99),
            **{f"{role}_cores": (after[role] - before[role]) / seconds for role in ROLES},
        }

    def _play(self, seed: int, seconds: float) -> Sequence[RequestRecord]:
        """Send steady Poisson traffic; deterministic for a seed."""
        rate_per_s = self.settings.rate_per_s
        traffic = WorkloadSettings(trace=_TRACE, rate_per_s=rate_per_s, duration_s=seconds, seed=seed)
        return play_trace(self.served.url, BodySettings(model=_MODEL), resolve(traffic), 60.0)


def play(settings: TunerCostSettings, context: Context) -> Iterator[Measurement]:
    """Measure all slices in order, then yield a row for each side."""
    if all(context.has({"search": side}) for side in ("idle", "working")):
        return
    sides: dict[str, list[Slice]] = {"idle": [], "working": []}
    slices = 2 * settings.pairs
    with (
        served_application(serve_config("tuner-cost", {"models": [model(settings.core_share)]})) as served,
        progress_bar("tuner_cost", slices) as advance,
    ):
        player = Player(settings, served)
        player.warm_up()
        for number in range(slices):
            side = "working" if number % 4 in (1, 2) else "idle"
            player.turn(working=side == "working")
            sides[side].append(player.slice(seed=1 + number // 2))
            advance()
    for side, found in sides.items():
        yield Measurement(
            key={"search": side},
            figures={name: [one[name] for one in found] for name in found[0]},
            seeds=range(1, settings.pairs + 1),
            traces=generated(_TRACE),
        )


def model(core_share: float) -> dict[str, Any]:
    """Return two emulated engines, and a tuner that searches and tries nothing."""
    pool = {
        "name": "all",
        "engine": {"emulated": {"profile": "laptop"}},
        "replicas": 2,
        "resources": {"num_cpus": 0.1},
    }
    tuner = {
        "mode": "advise",
        "profile": "laptop",
        # Back-to-back searches, short enough that an idle slice need not wait long.
        "every_s": 0.1,
        "min_requests": _MIN_REQUESTS,
        "search_cpu_s": 3.0,
        "core_share": core_share,
        "cool_down_s": 0.0,
    }
    return {
        "name": _MODEL,
        "pools": [pool],
        "scheduler": {"policy": "ewsjf"},
        "tuner": as_config(TunerSettings, tuner),
    }


def waits_ms(lines: Sequence[str]) -> list[float]:
    """Return the time from arrival to grant of each answered request, from the gateway's log."""
    answered = (line for line in lines if "event=concluded outcome=completed" in line)
    parts = (line.partition(" queue_wait_s=")[2].partition(" ")[0] for line in answered)
    return [1_000 * float(seconds) for seconds in parts if seconds]


EXPERIMENT = Experiment(settings=TunerCostSettings, play=play)
