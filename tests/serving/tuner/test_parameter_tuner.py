"""Parameter tuner driven as by the actor: observations in, orders out, with a real twin.

The decisions of its loop are tested in `tests/tuning`.
"""

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
from serve_app.serving import tuner as parameter_tuner
from serve_app.serving.state import StateStore
from serve_app.serving.tuner import ParameterTuner
from serve_app.tuning.digital_twin import CalibrationSettings, TwinSettings
from serve_app.tuning.parameter_loop import ParameterLoop, Result, SearchTask
from serve_app.tuning.rollout import Observation, Retune
from serve_app.tuning.settings import ParameterTuningSettings
from serve_app.tuning.study import Finding, RolloutSettings, StudySettings
from tests.builders import spec
from tests.core.metrics.builders import record

TARGET = "backpressure.target_waiting"
CONFIGURED = SchedulerSettings(model="m", routing=RoutingSettings(pools=("only",)))
REPLICA = spec("r1", "only", max_model_len=8_192, kv_tokens=32_768, max_num_seqs=16)
SMALL = ParameterTuningSettings(
    profile="laptop",
    min_requests=150,
    search_cpu_s=60.0,
    core_share=1.0,
    # The scripted latencies below fit no engine, so the twin would fail its check.
    calibration=CalibrationSettings(check_requests=1_000_000),
    twin=TwinSettings(window_requests=60, block_requests=20, learned_requests=50),
    study=StudySettings(search_windows=1, confirm_windows=4),
    rollout=RolloutSettings(mode="on", slice_s=20.0, settle_s=2.0, pairs=4),
)
ADVISES = replace(SMALL, rollout=replace(SMALL.rollout, mode="advise"))


def records(count: int) -> list[RequestRecord]:
    """Return answered requests of 20 seconds, of mixed lengths and equal latencies."""
    rng = random.Random(count)
    times = [20.0 * number / count for number in range(count)]
    return [
        record(
            request_id=f"r{at}",
            arrived_at=at,
            dispatched_at=at,
            first_token_at=at + 0.05,
            finished_at=at + 0.35,
            prompt_tokens=rng.choice([40, 90, 200, 1_500]),
            pool="only",
            replica="r1",
            length_queue="1-2048",
        )
        for at in times
    ]


def observed(at: float, ended: list[RequestRecord] | None = None, **changes: Any) -> Observation:
    usual = {"incarnation": 1, "lengths": [], "replicas": [REPLICA], "settings": CONFIGURED}
    encoded = msgspec.msgpack.encode(ended or [])
    return Observation(**{**usual, "at": at, "completed_until": at, "outcomes": encoded, **changes})


def begun(*parts: Any) -> tuple[ParameterTuner, ParameterLoop]:
    """Return a tuner that has observed its scheduler, and its loop."""
    made = ParameterTuner("m", *(parts or (SMALL,)))
    assert made.update(observed(0.0)) == []
    assert made.loop is not None
    return made, made.loop


def searching(*parts: Any) -> tuple[ParameterTuner, ParameterLoop]:
    made, loop = begun(*parts)
    made.update(observed(20.0, records(200)))
    assert isinstance(loop.work, SearchTask)
    return made, loop


async def searched(made: ParameterTuner, loop: ParameterLoop) -> None:
    """Update at one scheduler time until the search has ended."""
    async with asyncio.timeout(60):
        while loop.work is not None:
            await asyncio.sleep(0.02)
            assert made.update(observed(20.0)) == []


async def test_a_search_leaves_its_figures_and_its_cpu_time(monkeypatch: pytest.MonkeyPatch) -> None:
    made, loop = searching(ADVISES)
    reported: list[float] = []
    finish = loop.finish

    def reporting(result: Result | None, now: float, cpu_s: float) -> list[Retune]:
        reported.append(cpu_s)
        return finish(result, now, cpu_s)

    monkeypatch.setattr(loop, "finish", reporting)
    began_s, progress = time.process_time(), made.progress
    await searched(made, loop)
    (study,) = made.document()["studies"]
    assert study["candidates"] == 11
    (cpu_s,) = reported
    assert 0 < cpu_s <= time.process_time() - began_s
    # What has changed must be saved.
    assert made.progress != progress


async def test_work_that_fails_ends_and_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    async def worker(_: object) -> Finding:
        raise RuntimeError("no engine is like that")

    made, loop = searching(ADVISES, None, worker)
    await searched(made, loop)
    assert "event=tuner_work_failed model=m" in caplog.text
    assert made.document()["studies"] == []


async def test_a_search_ends_with_its_tuner(caplog: pytest.LogCaptureFixture) -> None:
    made, loop = searching(replace(ADVISES, core_share=0.01))
    # The thread has begun.
    await asyncio.sleep(0.1)
    made.stop()
    await searched(made, loop)
    assert made.document()["studies"] == []
    assert "tuner_work_failed" not in caplog.text
    made.update(observed(10_000.0, records(300)))
    assert loop.work is None


@pytest.mark.skipif(sys.platform != "linux", reason="threads have no priorities elsewhere")
async def test_work_is_done_in_one_thread_of_low_priority(monkeypatch: pytest.MonkeyPatch) -> None:
    made = ParameterTuner("m", SMALL)

    def priority(*_: object) -> int:
        return os.getpriority(os.PRIO_PROCESS, threading.get_native_id())

    before = priority()
    monkeypatch.setattr(parameter_tuner, "carry_out", priority)
    assert await made._in_thread(None) == min(19, before + 10)  # type: ignore[arg-type, comparison-overlap]
    assert priority() == before
    made.stop()


async def test_a_freeze_ends_a_trial_and_outlives_the_scheduler() -> None:
    made, loop = begun()
    loop.rollout.propose({**loop.rollout.incumbent, "target_waiting": 6}, 0.0, "for the test")
    assert made.is_trying
    (order,) = made.update(observed(1.0, frozen="an incident"))
    assert (order.valid_s, order.values[TARGET]) == (None, 3)
    assert (made.is_trying, made.freeze_due) == (False, "")
    # The next scheduler learns of the values and of the freeze only from the tuner.
    loop.rollout.incumbent = {**loop.rollout.incumbent, "target_waiting": 5}
    (order,) = made.update(observed(2.0, incarnation=2))
    assert (order.valid_s, order.values[TARGET]) == (None, 5)
    for _ in range(2):
        assert (made.freeze_due, loop.rollout.frozen) == ("an incident", "an incident")
        assert made.update(observed(2.0, incarnation=2)) == []
    made.update(observed(3.0, incarnation=2, frozen="an incident"))
    assert made.freeze_due == ""
    made.update(observed(4.0, incarnation=2))
    assert made.document()["audit"][0]["what"] == "thawed"


async def test_values_survive_a_restart_unless_the_settings_have_changed(tmp_path: Path) -> None:
    store = StateStore(str(tmp_path), "tuner", "m")
    made, loop = begun(SMALL, store)
    loop.rollout.incumbent = {**loop.rollout.incumbent, "target_waiting": 5}
    await made.save()
    again = ParameterTuner("m", SMALL, store)
    await again.load()
    # Nothing begins before the scheduler answers with its settings.
    assert again.update(observed(0.0, records(300), settings=None)) == []
    assert again.document()["state"] == "waiting for the scheduler"
    (order,) = again.update(observed(0.0))
    assert order.values[TARGET] == 5
    other = ParameterTuner("m", SMALL, store)
    await other.load()
    changed = replace(CONFIGURED, backpressure=replace(CONFIGURED.backpressure, target_waiting=4))
    assert other.update(observed(0.0, settings=changed)) == []
    assert other.loop is not None
    assert other.loop.rollout.incumbent["target_waiting"] == 4


async def test_a_state_that_cannot_be_used_is_kept_beside_the_new_one(tmp_path: Path) -> None:
    store = StateStore(str(tmp_path), "tuner", "m")
    _, loop = begun(SMALL, store)
    store.save({**loop.state(), "rollout": "of another release"})
    again = ParameterTuner("m", SMALL, store)
    await again.load()
    assert again.update(observed(0.0)) == []
    await again.save()
    assert store.load() == loop.state()
    store.path += ".rejected"
    assert (store.load() or {})["rollout"] == "of another release"


@pytest.mark.parametrize("changes", [{"core_share": 0.0}, {"every_s": 0.0}, {"min_requests": 0}])
def test_bad_settings_are_named(changes: dict[str, Any]) -> None:
    (name,) = changes
    with pytest.raises(ValueError, match=name):
        replace(SMALL, **changes)
