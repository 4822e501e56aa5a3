"""Parameter tuner driven as by the actor: observations in, orders out, with a real twin."""

import asyncio
import os
import random
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest

from serve_app.core import SchedulerSettings
from serve_app.core.metrics.record import RequestRecord
from serve_app.core.routing.pools import RoutingSettings
from serve_app.errors import Outcome
from serve_app.serving import tuner as parameter_tuner
from serve_app.serving.state import StateStore
from serve_app.serving.tuner import ParameterTuner, Worker
from serve_app.tuning.digital_twin import CalibrationSettings, TwinSettings
from serve_app.tuning.parameter_loop import Result, SearchTask
from serve_app.tuning.rollout import Observation, Retune, RolloutSettings
from serve_app.tuning.settings import ParameterTuningSettings
from serve_app.tuning.study import Finding, StudySettings
from tests.builders import spec

TARGET = "backpressure.target_waiting"
CONFIGURED = SchedulerSettings(model="m", routing=RoutingSettings(pools=("only",)))
REPLICA = spec("r1", "only", max_model_len=8_192, kv_tokens=32_768, max_num_seqs=16)
SMALL: dict[str, Any] = {
    "profile": "laptop",
    "min_requests": 150,
    "search_cpu_s": 60.0,
    "core_share": 1.0,
    # The scripted latencies below fit no engine, so the twin would fail its check.
    "calibration": CalibrationSettings(check_requests=1_000_000),
    "twin": TwinSettings(window_requests=60, block_requests=20, learned_requests=50),
    "study": StudySettings(search_windows=1, confirm_windows=4),
}


def tuner(
    mode: str = "on", store: StateStore | None = None, worker: Worker | None = None, **changes: Any
) -> ParameterTuner:
    rollout = RolloutSettings(mode=mode, slice_s=20.0, settle_s=2.0, pairs=4)  # type: ignore[arg-type]
    settings = ParameterTuningSettings(**{**SMALL, "rollout": rollout, **changes})
    return ParameterTuner("m", settings, store, worker)


def records(count: int, start: float, span_s: float, ttft_s: float = 0.05) -> list[RequestRecord]:
    """Return answered requests of mixed lengths with equal latencies."""
    rng = random.Random(count)
    made: list[RequestRecord] = []
    for number in range(count):
        at = start + span_s * number / count
        made.append(
            RequestRecord(
                request_id=f"r{at}",
                arrived_at=at,
                dispatched_at=at,
                first_token_at=at + ttft_s,
                finished_at=at + ttft_s + 0.3,
                outcome=Outcome.COMPLETED,
                prompt_tokens=rng.choice([40, 90, 200, 1_500]),
                output_tokens=30,
                tenant="t",
                pool="only",
                replica="r1",
                length_queue="1-2048",
            )
        )
    return made


def observed(at: float, ended: list[RequestRecord], **changes: Any) -> Observation:
    usual = {"incarnation": 1, "lengths": [], "replicas": [REPLICA], "settings": CONFIGURED}
    encoded = msgspec.msgpack.encode(ended)
    return Observation(**{**usual, "at": at, "completed_until": at, "outcomes": encoded, **changes})


def is_searching(tuner: ParameterTuner) -> bool:
    return tuner.loop is not None and isinstance(tuner.loop.work, SearchTask)


async def searched(tuner: ParameterTuner, at: float) -> list[Retune]:
    """Update at one scheduler time until the search has ended; return the orders."""
    orders: list[Retune] = []
    async with asyncio.timeout(60):
        while is_searching(tuner):
            await asyncio.sleep(0.02)
            orders = tuner.update(observed(at, []))
    return orders


async def test_a_search_begins_with_enough_traffic_and_leaves_its_figures() -> None:
    made = tuner("advise")
    assert made.update(observed(10.0, records(100, 0.0, 10.0))) == []
    assert not is_searching(made)
    assert made.document()["state"] == "idle"
    made.update(observed(20.0, records(100, 10.0, 10.0)))
    assert is_searching(made)
    assert made.document()["state"] == "searching"
    assert await searched(made, 20.0) == []
    (study,) = made.document()["studies"]
    assert study["candidates"] == 11
    # The next search is not due yet.
    made.update(observed(21.0, records(200, 20.0, 1.0)))
    assert not is_searching(made)


async def test_a_candidate_is_tried_in_slices_and_dropped_when_it_serves_worse() -> None:
    made = tuner()
    made.update(observed(0.0, []))
    assert made.loop is not None
    rollout = made.loop.rollout
    better = {**rollout.incumbent, "target_waiting": 6}
    rollout.propose(better, 0.0, "for the test")
    applied: list[Retune] = []
    at = 0.0
    while rollout.target is not None and at < 400.0:
        at += 1.0
        on_trial = bool(applied) and applied[-1].valid_s is not None
        applied += made.update(observed(at, records(12, at - 1.0, 1.0, ttft_s=5.0 if on_trial else 0.05)))
    assert rollout.target is None
    tried = [order for order in applied if order.valid_s is not None]
    assert tried
    assert all(order.values[TARGET] == 6 for order in tried)
    assert applied[-1].valid_s is None
    assert applied[-1].values[TARGET] == CONFIGURED.backpressure.target_waiting
    assert "rolled back" in [each["what"] for each in made.document()["audit"]]


async def test_work_that_fails_ends_and_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    async def worker(_: object) -> Finding:
        raise RuntimeError("no engine is like that")

    made = tuner("advise", worker=worker)
    made.update(observed(20.0, records(200, 0.0, 20.0)))
    assert await searched(made, 20.0) == []
    assert "event=tuner_work_failed model=m" in caplog.text
    assert made.document()["studies"] == []


async def test_freezing_ends_a_trial() -> None:
    made = tuner()
    made.update(observed(0.0, []))
    assert made.loop is not None
    made.loop.rollout.propose({**made.loop.rollout.incumbent, "target_waiting": 6}, 0.0, "for the test")
    (order,) = made.update(observed(1.0, [], frozen="an incident"))
    assert (order.valid_s, order.values[TARGET]) == (None, 3)
    made.update(observed(2.0, []))
    assert made.document()["audit"][0]["what"] == "thawed"


async def test_a_freeze_outlives_the_scheduler() -> None:
    made = tuner()
    made.update(observed(0.0, []))
    made.update(observed(1.0, [], frozen="an incident"))
    assert made.freeze_due == ""
    # The next scheduler learns of the freeze only from the tuner.
    for _ in range(2):
        made.update(observed(2.0, [], incarnation=2))
        assert made.freeze_due == "an incident"
        assert made.loop is not None
        assert made.loop.rollout.frozen == "an incident"
    made.update(observed(3.0, [], incarnation=2, frozen="an incident"))
    assert made.freeze_due == ""
    made.update(observed(4.0, [], incarnation=2))
    assert made.document()["audit"][0]["what"] == "thawed"


@pytest.mark.skipif(sys.platform != "linux", reason="threads have no priorities elsewhere")
async def test_work_is_done_in_one_thread_of_low_priority(monkeypatch: pytest.MonkeyPatch) -> None:
    made = tuner()

    def priority(*_: object) -> int:
        return os.getpriority(os.PRIO_PROCESS, threading.get_native_id())

    before = priority()
    monkeypatch.setattr(parameter_tuner, "carry_out", priority)
    assert await made._in_thread(None) == min(19, before + 10)  # type: ignore[arg-type, comparison-overlap]
    assert priority() == before
    made.stop()


async def test_a_new_scheduler_gets_the_permanent_values() -> None:
    made = tuner()
    made.update(observed(100.0, []))
    assert made.loop is not None
    adopted = {**made.loop.rollout.incumbent, "target_waiting": 5}
    made.loop.rollout.incumbent = adopted
    (order,) = made.update(observed(3.0, [], incarnation=2))
    assert (order.values[TARGET], order.valid_s) == (5, None)


async def test_values_survive_a_restart_unless_the_settings_have_changed(tmp_path: Path) -> None:
    store = StateStore(str(tmp_path), "tuner", "m")
    made = tuner(store=store)
    made.update(observed(100.0, []))
    assert made.loop is not None
    made.loop.rollout.incumbent = {**made.loop.rollout.incumbent, "target_waiting": 5}
    await made.save()
    again = tuner(store=StateStore(str(tmp_path), "tuner", "m"))
    await again.load()
    (order,) = again.update(observed(0.0, []))
    assert order.values[TARGET] == 5
    other = tuner(store=StateStore(str(tmp_path), "tuner", "m"))
    await other.load()
    changed = replace(CONFIGURED, backpressure=replace(CONFIGURED.backpressure, target_waiting=4))
    assert other.update(observed(0.0, [], settings=changed)) == []


async def test_without_replicas_or_settings_nothing_is_searched() -> None:
    made = tuner()
    assert made.update(observed(1.0, records(300, 0.0, 1.0), settings=None)) == []
    made.update(observed(2.0, records(300, 1.0, 1.0), replicas=[]))
    assert not is_searching(made)


async def test_a_search_ends_with_its_tuner() -> None:
    made = tuner("advise", core_share=0.01)
    made.update(observed(20.0, records(300, 0.0, 20.0)))
    assert is_searching(made)
    made.stop()
    async with asyncio.timeout(30):
        while is_searching(made):
            await asyncio.sleep(0.02)
            made.update(observed(21.0, []))
    assert made.document()["studies"] == []


async def test_the_cpu_time_of_a_search_decides_the_pause_after_it(monkeypatch: pytest.MonkeyPatch) -> None:
    made = tuner("advise")
    made.update(observed(20.0, records(200, 0.0, 20.0)))
    assert made.loop is not None
    reported: list[float] = []
    finish = made.loop.finish

    def reporting(result: Result | None, now: float, cpu_s: float) -> list[Retune]:
        reported.append(cpu_s)
        return finish(result, now, cpu_s)

    monkeypatch.setattr(made.loop, "finish", reporting)
    began_s = time.process_time()
    await searched(made, 20.0)
    (cpu_s,) = reported
    assert 0 < cpu_s <= time.process_time() - began_s


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"core_share": 0.0}, "core_share"),
        ({"every_s": 0.0}, "every_s"),
        ({"min_requests": 0}, "min_requests"),
    ],
)
def test_bad_settings_are_named(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ParameterTuningSettings(**{"profile": "laptop", **changes})
