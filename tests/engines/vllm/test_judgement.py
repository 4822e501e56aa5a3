"""vLLM judges the engine model: the same arrivals on both, with vLLM's own scheduler on a clock that jumps.

If a new release of vLLM schedules differently, a test fails here, and names the trace and the first step that
differs. `experiments/engine_model` plays more traces.
"""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from experiments.engine_model.comparison import compare, play
from experiments.engine_model.traces import CLASSES, RECORDED, EngineTrace, engine_trace
from serve_app.engines.model import EngineSequence, StepOutcome
from serve_app.lab.simulation import vllm_scheduler
from serve_app.lab.simulation.simulation import EngineKind
from serve_app.lab.simulation.vllm_scheduler import VllmModel

pytestmark = [pytest.mark.real_vllm, pytest.mark.timeout(600)]

TRACES, REQUESTS = 3, 60


@pytest.mark.parametrize("name", [*CLASSES, *RECORDED])
def test_the_model_makes_the_steps_of_vllms_scheduler(name: str) -> None:
    found = [compare(engine_trace(name, number, REQUESTS), EngineKind.VLLM) for number in range(TRACES)]
    assert [one.first_difference for one in found if one.first_difference] == []
    assert [one.hits_tokens[0] for one in found] == [one.hits_tokens[1] for one in found]


def test_asynchronous_scheduling_delays_first_tokens_by_at_most_two_steps() -> None:
    trace = engine_trace("roomy", 0, REQUESTS)
    longest_s = trace.step_time.step_s(
        prefill_tokens=trace.settings.max_num_batched_tokens,
        attended_pairs=trace.settings.max_num_batched_tokens**2,
        sequences=REQUESTS,
        context_tokens=REQUESTS * trace.settings.max_model_len,
    )
    pairs = compare(trace, EngineKind.VLLM_ASYNC).ttft_s
    assert 0.0 < sum(vllm - model for model, vllm in pairs) / len(pairs) < 2 * longest_s


# -- the same steps as vLLM's engine core -----------------------------------------------------------------


class Clock:
    """Replaces the module `time` for the timed executor: a sleep jumps."""

    def __init__(self) -> None:
        self.now = 0.0

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


class AtResult:
    """Replaces the executor's thread: the end of an iteration is awaited when its result is."""

    def submit(self, end: Callable[[], Any]) -> Any:
        return SimpleNamespace(result=end, done=lambda: False)


def play_on_engine_core(trace: EngineTrace, clock: Clock, *, asynchronous: bool) -> list[EngineSequence]:
    """Play a trace without aborts on vLLM's `EngineCore`, which calls the scheduler itself."""
    from vllm.v1.engine.core import EngineCore

    from serve_app.engines.vllm import timed

    class Executor(timed.TimedExecutor):  # type: ignore[misc, unused-ignore]
        def _init_executor(self) -> None:
            self.__dict__.update(
                _step_s=trace.step_time.step_s,
                _kv_tokens=trace.settings.kv_tokens,
                _sequences=timed.Sequences(),
                _words=vllm_scheduler._GivenTokens(),
                _batch=None,
                _free_at=0.0,
                _ends=AtResult(),
            )

    config = vllm_scheduler._config(trace.settings, asynchronous=asynchronous)
    core: Any = EngineCore(config, Executor, log_stats=False)
    engine = VllmModel(trace.settings, trace.step_time, asynchronous=asynchronous)
    engine._scheduler = core.scheduler
    pending = list(reversed(trace.sequences))
    while pending or engine._by_id:
        if not engine._by_id and not core.batch_queue:
            clock.now = max(clock.now, pending[-1].arrived_at)
        while pending and pending[-1].arrived_at <= clock.now:
            engine.add(pending.pop(), clock.now)
        outputs, _ = core.step_fn()
        outcome = StepOutcome(clock.now, 0, 0)
        for produced in (outputs or {}).values():
            for output in produced.outputs:
                engine._produce(output, outcome)
    return list(trace.sequences)


@pytest.mark.parametrize("kind", [EngineKind.VLLM, EngineKind.VLLM_ASYNC])
# Of requests that arrive together, `play` lets the first begin a step alone, so none do here.
@pytest.mark.parametrize("name", ["prefixes", "priorities"])
def test_the_steps_are_those_of_vllms_engine_core(
    name: str, kind: EngineKind, monkeypatch: pytest.MonkeyPatch
) -> None:
    from serve_app.engines.vllm import timed

    clock = Clock()
    monkeypatch.setattr(timed, "time", clock)
    # These settle the process, which belongs to other tests as well.
    for name_of_core in ("enable_envs_cache", "freeze_gc_heap"):
        monkeypatch.setattr(f"vllm.v1.engine.core.{name_of_core}", lambda: None)
    trace = engine_trace(name, 0, REQUESTS)
    expected = play(trace, kind).sequences
    found = play_on_engine_core(trace, clock, asynchronous=kind is EngineKind.VLLM_ASYNC)
    assert [one.finished_at for one in found] == pytest.approx([one.finished_at for one in expected])
    assert [one.first_token_at for one in found] == pytest.approx([one.first_token_at for one in expected])
