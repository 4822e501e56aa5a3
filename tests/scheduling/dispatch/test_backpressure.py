from typing import Any

import pytest

from serve_app.routing.pools import RoutingSettings
from serve_app.scheduling.dispatch.backpressure import BackpressureSettings
from serve_app.scheduling.events import FirstToken, Woke
from tests.builders import Simulation, dispatched


def world(**changes: Any) -> Simulation:
    backpressure = BackpressureSettings(**{"lag_factor": 0.0, **changes})
    made = Simulation(routing=RoutingSettings(pools=("only",)), backpressure=backpressure)
    made.join("r1", "only", kv_tokens=500_000, max_model_len=100_000)
    return made


def test_a_replica_that_generates_too_slowly_gets_no_more_until_it_has_clearly_recovered() -> None:
    made = world(tpot_gate_s=0.15, tpot_reopen_ratio=0.9)
    made.report("r1", running=5, tpot_s=0.16)
    assert made.arrive("a") == []
    made.report("r1", running=5, tpot_s=0.14)
    assert made.scheduler.find("a").queued  # type: ignore[union-attr]
    assert dispatched(made.report("r1", running=5, tpot_s=0.13)) == [("a", "r1")]
    made.report("r1", running=5, tpot_s=0.14)
    assert dispatched(made.arrive("b")) == [("b", "r1")]


def test_an_idle_engine_is_never_gated() -> None:
    made = world(tpot_gate_s=0.15)
    made.report("r1", running=0, tpot_s=0.9, kv_usage_ratio=1.0)
    assert dispatched(made.arrive("a")) == [("a", "r1")]


def test_no_gate_holds_nothing_back() -> None:
    made = world(tpot_gate_s=None)
    made.report("r1", running=5, tpot_s=9.0)
    assert dispatched(made.arrive("a")) == [("a", "r1")]


def test_a_nearly_full_cache_holds_back_what_would_preempt() -> None:
    made = world(kv_gate_ratio=0.95)
    made.report("r1", running=5, kv_usage_ratio=0.96)
    assert made.arrive("a") == []
    assert dispatched(made.report("r1", running=5, kv_usage_ratio=0.9)) == [("a", "r1")]


def test_prefill_work_under_way_counts_though_the_cache_is_nearly_empty() -> None:
    made = world(max_prefill_backlog_s=4.0)
    # At 0.1 ms per token, as long as nothing has been learned, this is six seconds.
    assert dispatched(made.arrive("huge", prompt_tokens=60_000)) == [("huge", "r1")]
    assert made.arrive("small") == []
    assert dispatched(made.feed(FirstToken("huge"))) == [("small", "r1")]


def test_prompts_whose_prefill_nobody_sees_end_do_not_count_as_under_way_until_the_answer_is_there() -> None:
    made = world(max_prefill_backlog_s=4.0, target_waiting=1_000)
    made.join("r1", "only", kv_tokens=500_000, max_model_len=100_000, max_num_seqs=500)
    # In all twelve seconds of prefill at 0.1 ms per token; the answers take longer than all of them.
    for number in range(200):
        made.report("r1", after_s=0.3, received=number)
        assert dispatched(made.arrive(f"r{number}", prompt_tokens=600, streamed=False))


def test_a_huge_prompt_whose_prefill_nobody_sees_end_counts_for_its_usual_time() -> None:
    made = world(max_prefill_backlog_s=4.0)
    made.arrive("huge", prompt_tokens=60_000, streamed=False)
    assert made.arrive("small") == []
    for _ in range(6):
        assert made.scheduler.find("small").queued  # type: ignore[union-attr]
        made.report("r1", after_s=2.0, received=1)
    # Six seconds, and as many of patience.
    made.feed(Woke(), after_s=0.1)
    assert not made.scheduler.find("small").queued  # type: ignore[union-attr]


def test_an_answer_that_is_not_streamed_teaches_nothing_of_prefills() -> None:
    made = world()
    made.arrive("r", prompt_tokens=100, streamed=False)
    made.feed(FirstToken("r"), after_s=30.0)
    assert made.scheduler.prefill_cost.observations == 0


@pytest.mark.parametrize(
    ("values", "complaint"),
    [
        ({"batch_target_waiting": -1}, "batch_target_waiting must not be negative, got -1"),
        ({"tpot_gate_s": 0.0}, "tpot_gate_s must be positive, got 0.0: null is no gate"),
        ({"tpot_reopen_ratio": 1.5}, "tpot_reopen_ratio must be above 0 and at most 1, got 1.5"),
        ({"kv_gate_ratio": 0.0}, "kv_gate_ratio must be positive, got 0.0"),
        ({"max_prefill_backlog_s": -1.0}, "max_prefill_backlog_s must be positive, got -1.0"),
    ],
)
def test_settings_that_make_no_sense_are_refused(values: dict[str, Any], complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        BackpressureSettings(**values)
