#!/usr/bin/env python
"""A served application tunes itself under load: is a winner adopted, a bad candidate taken back, who is lost?

    .venv/bin/python scripts/bench_live_tuning.py --case winner
    .venv/bin/python scripts/bench_live_tuning.py --case poisoned --seconds 160

One model with one emulated engine (Llama 3.1 8B on an RTX 4090, 16 sequences at most), a gateway, a scheduler
and its tuner, in mode `on` with short slices; steady Poisson traffic over HTTP, streamed, 80 % short prompts.

    winner      starts from bad values (an engine queue so long that no order matters, urgency that turns
                every order into that of arrival), and searches in its twin
    poisoned    starts from the defaults; the search is replaced by one that is sure of the bad values

The rate is a little above what the engine can carry for ever, since the order of service matters where there
is a queue.

What is printed: the tuner's own audit, by the time since the load began; the values in force as GET
/debug/status tells them; reward and TTFT by class before the trial, during it and after it; how every request
ended; the counters of the metrics. The exit status is 1 when the winner was not adopted, or the poisoned
candidate was not rolled back, or a request was lost.

What it cannot show: client, gateway, engine and search share the machine, so times have its noise.
"""

import argparse
import asyncio
import collections
import json
import os
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import uvloop
import yaml
from prometheus_client.parser import text_string_to_metric_families

from experiments.common.application import free_port, started_application
from serve_app.bench.bodies import BodyFactory, BodySettings
from serve_app.bench.connection import ConnectionPool, Target
from serve_app.bench.load import LoadSettings, OpenLoop
from serve_app.command import positive_float
from serve_app.errors import ServeAppError
from serve_app.metrics.record import RequestRecord
from serve_app.provenance import commit, load_average
from serve_app.tuning.objective.objective import ObjectiveSettings, reward_of
from serve_app.tuning.objective.service_class import ClassTarget, ClassTargets
from serve_app.workloads.arrivals import GammaArrivals
from serve_app.workloads.lengths import MixedLengths, UniformLengths
from serve_app.workloads.streams import stream
from serve_app.workloads.trace import Trace, TraceRequest

PROFILE = "llama31-8b-rtx4090-tp1"
IMPORT_PATHS = {"winner": "serve_app.app:build_app", "poisoned": "poisoned_tuner:build_app"}
VERDICTS = {"winner": "adopted", "poisoned": "rolled back"}
# Those of `poisoned_tuner.AWFUL`, by the path of the setting.
BAD_START = {
    "ewsjf": {"weights": {"a_u": 0.01, "b_u": 5.0, "a_f": -5e-5, "b_f": 0.5}},
    "isolation": {"max_long_prefills": 8, "max_longest_prefills": 8, "short_work_share": 0.6},
    "backpressure": {"target_waiting": 16},
}
TARGET = ClassTarget(ttft_s=0.5, long_ttft_s=5.0, tpot_s=None)
OBJECTIVE = ObjectiveSettings(targets=ClassTargets(default=TARGET), min_requests=20)


@dataclass(slots=True)
class Watch:
    """What GET /debug/status told while the load ran.

    Attributes:
        began: when the load did, on the monotonic clock.
        audits: decisions, each with its time since then; as the page ages them, to a second or so.
        values: in force, each change with its time.
    """

    url: str
    began: float = 0.0
    audits: dict[tuple[str, str, str], float] = field(default_factory=dict)
    values: list[tuple[float, dict[str, float]]] = field(default_factory=list)
    last: dict[str, Any] = field(default_factory=dict)

    async def run(self) -> None:
        """Look once a second, until cancelled."""
        while True:
            await asyncio.to_thread(self.look)
            await asyncio.sleep(1.0)

    def look(self) -> None:
        """Look once."""
        now = time.monotonic() - self.began
        model = json.loads(fetched(f"{self.url}/debug/status"))["models"][0]
        tuner = self.last = model["tuner"]
        for each in tuner.get("audit", ()):
            key = (each["what"], each["why"], json.dumps(each["figures"], sort_keys=True))
            self.audits.setdefault(key, now - min(each["age_s"], 1.0))
        if tuner["values"] and (not self.values or self.values[-1][1] != tuner["values"]):
            self.values.append((now, tuner["values"]))

    def first(self, *what: str) -> float | None:
        """When something of that kind was first decided."""
        return min((at for (act, _, _), at in self.audits.items() if act in what), default=None)


def main() -> int:
    """Start, drive and print."""
    args = arguments()
    # The workers of Ray import what this folder has.
    here = str(Path(__file__).resolve().parent)
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (here, os.environ.get("PYTHONPATH"))))
    try:
        return 0 if run(args) else 1
    except ServeAppError as exc:
        print(f"bench_live_tuning: {exc}", file=sys.stderr)
        return 2


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--case", choices=IMPORT_PATHS, default="winner", help="(%(default)s)")
    parser.add_argument("--rate", type=positive_float, default=10.0, help="requests per s (%(default)s)")
    parser.add_argument("--seconds", type=positive_float, default=220.0, help="of load (%(default)s)")
    parser.add_argument("--log", type=Path, help="keep the output of the application here")
    return parser.parse_args()


def run(args: argparse.Namespace) -> bool:
    """Whether it went as it should."""
    with tempfile.TemporaryDirectory() as folder:
        config = Path(folder) / "serve.yaml"
        config.write_text(yaml.safe_dump(application(args.case)), encoding="utf-8")
        log = args.log or Path(folder) / "serve.log"
        with started_application(config, log) as (_, url):
            watch = Watch(url)
            before = counters(url)
            records = uvloop.run(drive(watch, trace(args.rate, args.seconds)))
            watch.look()
            changed = {name: value - before.get(name, 0.0) for name, value in counters(url).items()}
    print(f"case {args.case}, commit {commit()}, load average {load_average()}\n")
    for line in report(args.case, watch, records, changed):
        print(line)
    lost = [record for record in records if not record.completed]
    return watch.first(VERDICTS[args.case]) is not None and not lost


def application(case: str) -> dict[str, Any]:
    """One model in front of one emulated engine."""
    model = {
        "name": "tuned",
        "pools": [
            {
                "name": "all",
                "engine": {"emulated": {"profile": PROFILE, "max_num_seqs": 16}},
                "resources": {"num_cpus": 0.1},
            }
        ],
        "scheduler": {"policy": "ewsjf", **(BAD_START if case == "winner" else {})},
        "tuner": {
            "parameters": {
                "profile": PROFILE,
                "every_s": 15.0,
                "min_requests": 250,
                "search_cpu_s": 8.0,
                "objective": {"targets": {"default": asdict(TARGET)}, "min_requests": OBJECTIVE.min_requests},
                "twin": {"window_requests": 100, "block_requests": 50, "learned_requests": 100},
                "study": {"trials": 30, "rungs": [1, 2, 4], "confirm_windows": 8, "finalists": 1},
                "rollout": {
                    "mode": "on",
                    "max_step": 1.0,
                    "slice_s": 15.0,
                    "settle_s": 5.0,
                    "pairs": 3,
                    "min_class_requests": 30,
                    "cool_down_s": 600.0,
                    "failure_cool_down_s": 600.0,
                },
            }
        },
    }
    return {
        "proxy_location": "HeadOnly",
        "http_options": {"host": "127.0.0.1", "port": free_port()},
        "logging_config": {"enable_access_log": False},
        "applications": [
            {
                "name": "live-tuning",
                "route_prefix": "/",
                "import_path": IMPORT_PATHS[case],
                "args": {"models": [model], "gateways": {"replicas": 1, "num_cpus": 0.2}},
            }
        ],
    }


def trace(rate_per_s: float, seconds: float) -> Trace:
    """Steady Poisson traffic."""
    count = round(rate_per_s * seconds)
    prompts = MixedLengths(((0.8, UniformLengths(16, 200)), (0.2, UniformLengths(1_500, 4_000))))
    arrivals = GammaArrivals(rate_per_s=rate_per_s).sample(count, stream(0, "arrivals"))
    rows = zip(
        arrivals,
        prompts.sample(count, stream(0, "prompts")),
        UniformLengths(20, 60).sample(count, stream(0, "answers")),
        strict=True,
    )
    requests = tuple(
        TraceRequest(arrival_s=float(at), prompt_tokens=int(prompt), output_tokens=int(answer))
        for at, prompt, answer in rows
    )
    return Trace(name="steady", source=f"{rate_per_s:g} requests/s", requests=requests)


async def drive(watch: Watch, requests: Trace) -> list[RequestRecord]:
    """Play the traffic and watch meanwhile; times count from its beginning."""
    target = Target.parse(watch.url)
    pool = ConnectionPool(target)
    factory = BodyFactory(BodySettings(model="tuned"), target.authority, target.path_prefix)
    # The first request leaves at once, whatever its time in the trace.
    watch.began = time.monotonic()
    watching = asyncio.create_task(watch.run())
    try:
        result = await OpenLoop(pool, factory, LoadSettings(timeout_s=120.0)).run(requests)
    finally:
        watching.cancel()
        pool.close()
    return result.records


def counters(url: str) -> dict[str, float]:
    """What the scheduler counted, by metric and its labels."""
    found: dict[str, float] = {}
    for family in text_string_to_metric_families(fetched(f"{url}/metrics")):
        for sample in family.samples:
            if sample.name in ("ewsjf_retunings_total", "ewsjf_requests_concluded_total"):
                label = sample.labels.get("outcome", "")
                name = f"{sample.name} {label}".strip()
                found[name] = found.get(name, 0.0) + sample.value
    return found


def fetched(url: str) -> str:
    """The body under an address of our own."""
    with urllib.request.urlopen(url, timeout=10) as answer:  # noqa: S310 - see above
        text: str = answer.read().decode()
    return text


def report(
    case: str, watch: Watch, records: Sequence[RequestRecord], changed: dict[str, float]
) -> Iterator[str]:
    """What happened."""
    yield "| s | tuner | why | figures |\n|---|---|---|---|"
    for (what, why, figures), at in sorted(watch.audits.items(), key=lambda one: one[1]):
        told = ", ".join(f"{name} {value:.3g}" for name, value in json.loads(figures).items())
        yield f"| {at:.0f} | {what} | {why} | {told} |"
    yield "\n| s | values in force |\n|---|---|"
    for at, values in watch.values:
        told = ", ".join(f"{path.rpartition('.')[2]} {value:g}" for path, value in values.items())
        yield f"| {at:.0f} | {told} |"
    yield from served(watch, VERDICTS[case], records)
    outcomes = collections.Counter(record.outcome.value for record in records)
    yield f"\nsent {len(records)}, " + ", ".join(f"{name} {count}" for name, count in outcomes.items())
    yield "counted: " + ", ".join(f"{name} {value:+.0f}" for name, value in sorted(changed.items()))
    studies = watch.last.get("studies", ())
    yield f"tuner at the end: {watch.last.get('mode')}, {watch.last.get('state')}, searches {len(studies)}"
    for study in studies:
        gain = "" if study["gain"] is None else f", gain in the twin {study['gain']:+.3f}"
        pace = f"engines' pace {study['speed_factor']:.2f}"
        yield f"- {study['trials']} candidates, {pace}{gain}: {study['reason']}"


def served(watch: Watch, verdict: str, records: Sequence[RequestRecord]) -> Iterator[str]:
    """How requests were served before the trial, during it and after its verdict."""
    yield "\n| phase | reward | class | requests | within targets | TTFT p50 | p99 |\n|---" + "|---" * 6 + "|"
    never = float("inf")
    begun, over = (at if at is not None else never for at in (watch.first("started"), watch.first(verdict)))
    stretches = {"before": (0.0, begun), "trial": (begun, over), "after": (over, never)}
    for phase, (first, last) in stretches.items():
        arrived = [one for one in records if first <= one.arrived_at - watch.began < last]
        reward = reward_of(arrived, OBJECTIVE)
        value = "-" if reward.value is None else f"{reward.value:.3f}"
        for name, each in reward.classes.items():
            ttft = (each.ttft_p50_s, each.ttft_p99_s)
            cells = [phase, value, name, str(each.requests), f"{each.attainment_ratio:.0%}"]
            cells += ["-" if seconds is None else f"{seconds:.2f}" for seconds in ttft]
            yield f"| {' | '.join(cells)} |"


if __name__ == "__main__":
    sys.exit(main())
