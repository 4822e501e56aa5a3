"""A served application tunes itself under load: is a winner adopted, and is a bad candidate taken back?

In the case `defaults` it serves the traffic untuned. In the case `winner` it starts from other
values, and its tuner searches in its twin, which learns the engine from what it does. In the case `poisoned`
it starts from the defaults, and the search is replaced by one that is sure of bad values.
Traffic is steady, streamed, 80 % short prompts, a little above what the engine can carry for ever: the order
of service matters where there is a queue.
"""

import asyncio
import collections
import math
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import uvloop

from experiments.common.application import started_application
from experiments.common.experiment import Context, Experiment, Measurement
from experiments.common.open_loop import drive
from experiments.common.provenance import generated
from experiments.live_tuning.application import IMPORT_PATHS, MODEL, OBJECTIVE, VERDICTS, model
from experiments.live_tuning.watch import Watch
from serve_app.bench.bodies import BodySettings
from serve_app.bench.load import LoadResult
from serve_app.errors import SettingsError
from serve_app.metrics.record import RequestRecord
from serve_app.settings_base import settings
from serve_app.tuning.objective.objective import reward_of
from serve_app.workloads.arrivals import GammaArrivals
from serve_app.workloads.lengths import MixedLengths, UniformLengths
from serve_app.workloads.streams import stream
from serve_app.workloads.trace import Trace, TraceRequest

_TIMEOUT_S = 120.0
_PART_S = 60.0


@settings
class LiveTuningSettings:
    """What is played.

    Attributes:
        cases: which are played.
        seconds: of traffic, by case.
        slice_s: for how long a candidate is in force, and then the values before it.
    """

    cases: tuple[str, ...]
    seconds: Mapping[str, float]
    rate_per_s: float
    slice_s: float = 15.0

    def __post_init__(self) -> None:
        if unknown := [case for case in self.cases if case not in IMPORT_PATHS]:
            raise SettingsError(f"no case {', '.join(unknown)}: there are {', '.join(IMPORT_PATHS)}")


def play(settings: LiveTuningSettings, context: Context) -> Iterator[Measurement]:
    """Each case with an application of its own."""
    for case in settings.cases:
        if context.has({"case": case}):
            continue
        trace = traffic(settings.rate_per_s, settings.seconds[case])
        models = [model(case, settings.slice_s)]
        with started_application("live-tuning", models, IMPORT_PATHS[case]) as served:
            watch = Watch(served)
            load = uvloop.run(_drive(watch, trace))
            watch.look()
        yield Measurement(
            key={"case": case},
            figures=figures_of(case, watch, load.records),
            seeds=(0,),
            traces=generated("steady traffic"),
        )


def traffic(rate_per_s: float, seconds: float) -> Trace:
    """Steady Poisson traffic."""
    count = round(rate_per_s * seconds)
    prompts = MixedLengths(((0.8, UniformLengths(16, 200)), (0.2, UniformLengths(1_500, 4_000))))
    rows = zip(
        GammaArrivals(rate_per_s=rate_per_s).sample(count, stream(0, "arrivals")),
        prompts.sample(count, stream(0, "prompts")),
        UniformLengths(20, 60).sample(count, stream(0, "answers")),
        strict=True,
    )
    requests = tuple(
        TraceRequest(arrival_s=float(at), prompt_tokens=int(prompt), output_tokens=int(answer))
        for at, prompt, answer in rows
    )
    return Trace(name="steady", source=f"{rate_per_s:g} requests/s", requests=requests)


def figures_of(case: str, watch: Watch, records: Sequence[RequestRecord]) -> dict[str, Any]:
    """What was decided when, how every request ended, and how requests were served meanwhile."""
    outcomes = collections.Counter(record.outcome.value for record in records)
    decisions = sorted(watch.decisions.items(), key=lambda one: one[1])
    return {
        "decisions": [
            {"at_s": at_s, "what": one.what, "why": one.why, "figures": dict(one.figures)}
            for one, at_s in decisions
        ],
        "twin_errors": watch.errors,
        "parts": _parts(watch, records),
        "started_s": watch.first_s("started"),
        "verdict_s": watch.first_s(VERDICTS[case]),
        "outcomes": dict(outcomes),
        "phases": _phases(watch, VERDICTS[case], records),
        "searches": len(watch.last.get("studies", ())),
    }


async def _drive(watch: Watch, trace: Trace) -> LoadResult:
    """Play the traffic and watch meanwhile; times count from its beginning."""
    # The first request leaves at once, whatever its time in the trace.
    watch.began = time.monotonic()
    watching = asyncio.create_task(watch.run())
    try:
        return await drive(watch.served.url, BodySettings(model=MODEL), trace, _TIMEOUT_S)
    finally:
        watching.cancel()


def _parts(watch: Watch, records: Sequence[RequestRecord]) -> list[float | None]:
    """The reward of each minute's arrivals; the same requests in every case."""
    of_minute: dict[int, list[RequestRecord]] = collections.defaultdict(list)
    for one in records:
        of_minute[int((one.arrived_at - watch.began) // _PART_S)].append(one)
    return [reward_of(of_minute[minute], OBJECTIVE).value for minute in range(max(of_minute) + 1)]


def _phases(watch: Watch, verdict: str, records: Sequence[RequestRecord]) -> dict[str, dict[str, Any]]:
    """How requests were served before the trial, during it and after its verdict."""
    begun_s, over_s = (watch.first_s(what) for what in ("started", verdict))
    begun_s = math.inf if begun_s is None else begun_s
    over_s = math.inf if over_s is None else over_s
    phases = {"before": (0.0, begun_s), "trial": (begun_s, over_s), "after": (over_s, math.inf)}
    found = {}
    for phase, (first_s, last_s) in phases.items():
        arrived = [one for one in records if first_s <= one.arrived_at - watch.began < last_s]
        ttfts_s = sorted(one.ttft_s for one in arrived if one.ttft_s is not None)
        found[phase] = {
            "requests": len(arrived),
            "reward": reward_of(arrived, OBJECTIVE).value,
            "ttft_p50_s": ttfts_s[len(ttfts_s) // 2] if ttfts_s else None,
        }
    return found


EXPERIMENT = Experiment(settings=LiveTuningSettings, play=play)
