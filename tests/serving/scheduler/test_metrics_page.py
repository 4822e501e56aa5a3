"""The whole metrics page of a scheduler after a scripted log, as the reference parser reads it.

`metrics_page.txt` has all samples but those of the process and of the time that decisions take. It has a
bucket only where the count rises. `python -m tests.serving.scheduler.test_metrics_page` writes the file anew
after an intended change.
"""

import asyncio
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from serve_app.core import events as ev
from serve_app.core.dispatch.backpressure import BackpressureSettings
from serve_app.core.routing.pools import RoutingSettings
from serve_app.errors import Outcome
from serve_app.request import DecodeGap, LatencyTarget, PriorityClass, RequestTimes, Usage
from serve_app.serving.channel.messages import Register, Report
from serve_app.serving.scheduler import live_scheduler
from serve_app.serving.scheduler.live_scheduler import LiveScheduler, LiveSchedulerOptions
from tests import builders
from tests.serving.channel.harness import FAST, FakeReplica, RecordingLink

PAGE = Path(__file__).with_name("metrics_page.txt")
INTERACTIVE, BATCH = PriorityClass.INTERACTIVE, PriorityClass.BATCH
# Far in the future, so that no timer of the loop is due; all steps are multiples of 1/8 s, which are exact.
START_S = 2.0**30


class ScriptedLog:
    """A live scheduler without connections, on a manual clock."""

    def __init__(self) -> None:
        self.now = START_S
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(live_scheduler, "precise_clock", lambda _loop: lambda: self.now)
            settings = builders.settings(
                routing=RoutingSettings(pools=("short", "mid", "long"), b_short_tokens=500),
                backpressure=BackpressureSettings(report_limit_s=20.0),
            )
            self.live = LiveScheduler(settings, LiveSchedulerOptions(incarnation=3, channel=FAST))
        self.link: Any = RecordingLink()

    def feed(self, event: ev.Event, after_s: float = 0.0) -> None:
        self.now += after_s
        self.live.now()
        self.live.feed(event)

    def join(self, replica_id: str, pool: str, **limits: Any) -> None:
        spec, address = builders.spec(replica_id, pool, **limits), FakeReplica(replica_id, pool, 8).address
        self.live._replicas.on_message(replica_id, self.link, Register(spec, address))
        self.report(replica_id)

    def report(self, replica_id: str, **load: Any) -> None:
        self.live._replicas.on_message(replica_id, self.link, Report(builders.report(**load)))

    def arrive(self, request_id: str, tenant: str, priority: PriorityClass, **fields: Any) -> None:
        fields.setdefault("expires_at", self.now + 600.0)
        self.feed(
            ev.Arrived(
                builders.request(request_id, tenant=tenant, priority=priority, arrived_at=self.now, **fields)
            )
        )

    def fail(self, request_id: str, failure: ev.DispatchFailure) -> None:
        running = self.live.core.find(request_id)
        assert running is not None
        assert running.replica_id is not None
        self.feed(ev.DispatchFailed(request_id, running.replica_id, failure))

    def finish(
        self,
        request_id: str,
        prompt_tokens: int,
        output_tokens: int,
        *,
        after_s: float,
        outcome: Outcome = Outcome.COMPLETED,
        times: RequestTimes | None = None,
        gap: DecodeGap | None = None,
    ) -> None:
        usage = Usage(prompt_tokens=prompt_tokens, output_tokens=output_tokens)
        self.feed(ev.Finished(request_id, outcome, usage, times, gap), after_s)


def play() -> LiveScheduler:
    """Play the log, and return its scheduler."""
    log = ScriptedLog()
    log.join("s1", "short")
    log.join("s2", "short")
    log.join("l1", "long", max_model_len=4_000, kv_tokens=16_000)
    log.join("m1", "mid")
    log.report("m1", draining=True)
    # A request of the short pool turns out to be long; nothing else explains the pause in its answer.
    log.arrive("a0", "acme", INTERACTIVE, target=LatencyTarget(ttft_s=1.0, tpot_s=0.001))
    log.feed(ev.FirstToken("a0"), after_s=0.5)
    times = RequestTimes("/v1/completions", 0.0, 0.0, 0.5, 2.5)
    log.finish("a0", 100, 900, after_s=2.0, times=times, gap=DecodeGap(0.25, 0.0))
    # One is put back by a busy engine, and then fails: its tokens do not measure the estimate.
    log.arrive("z0", "zeta", BATCH)
    log.fail("z0", ev.DispatchFailure.BUSY)
    log.finish("z0", 30, 4, after_s=1.0, outcome=Outcome.FAILED)
    # Nine fill all replicas, and some wait; the waits of the later ones are predicted.
    for number in range(9):
        log.arrive(f"f{number}", "acme" if number % 2 else "zeta", BATCH if number % 3 else INTERACTIVE)
    for number in range(3):
        log.arrive(f"w{number}", "acme" if number % 2 else "nova", INTERACTIVE)
    for number in range(3):
        log.finish(f"f{number}", 40, 10, after_s=0.75)
    for number in range(3):
        log.arrive(f"v{number}", "acme" if number % 2 else "nova", BATCH)
    for number in range(3, 6):
        log.finish(f"f{number}", 40, 10, after_s=1.25)
    # Replicas in every state: s2 drains, s3 is suspended, s4 becomes stale, and s5 leaves with a request.
    for replica_id in ("s3", "s4", "s5"):
        log.join(replica_id, "short", kv_tokens=None if replica_id == "s3" else 10_000)
    log.arrive("n0", "nova", INTERACTIVE)
    log.fail("n0", ev.DispatchFailure.UNREACHABLE)
    log.arrive("n1", "nova", INTERACTIVE)
    log.live._replicas.on_loss("s5", log.link)
    log.now += 8.0
    for replica_id, waiting in (("s1", 1), ("s2", 2), ("s3", 3), ("l1", 4), ("m1", 0)):
        is_draining = replica_id in ("s2", "m1")
        log.report(replica_id, waiting=waiting, kv_usage_ratio=waiting / 8, draining=is_draining)
    log.feed(ev.Woke(), after_s=15.0)
    # The queue fills again, and one request expires.
    for number in range(12):
        log.arrive(f"x{number}", "acme" if number % 3 else "zeta", BATCH, prompt_tokens=10 * (number + 1))
    log.arrive("late", "nova", INTERACTIVE, expires_at=log.now + 3.0)
    log.feed(ev.Woke(), after_s=4.0)
    # Neither serves a request: l2 is open but too small, and l3 has no room in its KV cache.
    log.join("l2", "long", max_model_len=20)
    log.join("l3", "long", max_model_len=20)
    log.arrive("last", "nova", PriorityClass.DEFAULT)
    log.arrive("young", "nova", BATCH)
    ledger, programs = log.live.core.ledger, log.live.core.programs
    ledger.reserve(ledger["l3"], ledger["l3"].kv_budget)
    programs.turns, programs.saved_tokens, programs.moved, programs.forced = 1, 2, 3, 4
    return log.live


def lines(page: str) -> Iterator[str]:
    """Yield the samples of a page that a log determines, below the name and the type of their metric."""
    for family in text_string_to_metric_families(page):
        if family.name.startswith(("ewsjf_process_", "ewsjf_build_info", "ewsjf_overhead_seconds")):
            continue
        yield f"{family.name} {family.type}"
        counts = defaultdict[str, float](float)
        for sample in family.samples:
            labels = dict(sample.labels)
            assert labels.pop("model") == "m"
            if "le" in labels:
                key = repr(labels | {"le": ""})
                before, counts[key] = counts[key], sample.value
                if sample.value == before:
                    continue
            shown = ", ".join(f"{name}={value}" for name, value in labels.items())
            yield f"  {sample.name.removeprefix(family.name)}[{shown}] {sample.value:.9g}"


async def test_a_log_leads_to_the_page() -> None:
    assert list(lines(await play().exposition())) == PAGE.read_text().splitlines()


async def write() -> None:
    PAGE.write_text("\n".join(lines(await play().exposition())) + "\n")


if __name__ == "__main__":
    asyncio.run(write())
