from collections import Counter

import pytest

from serve_app.lab.simulation.direct import Balance, DirectSimulation
from tests.lab.simulation.builders import mixed_requests, plan


def test_round_robin_gives_every_engine_its_turn() -> None:
    direct = DirectSimulation([plan(name, "all", max_model_len=8_000) for name in "abc"], Balance.ROUND_ROBIN)
    records = direct.run(mixed_requests(90, rate_per_s=5.0, seed=1))
    assert Counter(record.replica for record in records) == {"a": 30, "b": 30, "c": 30}


def test_power_of_two_prefers_the_less_busy_of_those_it_draws() -> None:
    plans = [plan(name, "all", max_model_len=8_000) for name in "abcd"]
    requests = mixed_requests(200, rate_per_s=8.0, seed=2)
    records = DirectSimulation(plans, Balance.POWER_OF_TWO).run(requests)
    served = Counter(record.replica for record in records)
    assert set(served) == set("abcd")
    # Random choice would leave them further apart, round robin would leave them equal.
    assert 0 < max(served.values()) - min(served.values()) < 40
    again = DirectSimulation(plans, Balance.POWER_OF_TWO).run(mixed_requests(200, rate_per_s=8.0, seed=2))
    assert again == records


def test_least_outstanding_prefers_the_engine_that_has_less_to_do() -> None:
    quick, slow = (
        plan("quick", "all", max_model_len=8_000),
        plan("slow", "all", max_model_len=8_000, max_num_seqs=1),
    )
    records = DirectSimulation([quick, slow]).run(mixed_requests(200, rate_per_s=8.0, seed=2))
    served = Counter(record.replica for record in records)
    assert served["quick"] > 2 * served["slow"] > 0


def test_equally_idle_engines_take_turns() -> None:
    direct = DirectSimulation([plan(name, "all", max_model_len=8_000) for name in "ab"])
    records = direct.run(mixed_requests(40, rate_per_s=0.05, seed=3))
    assert Counter(record.replica for record in records) == {"a": 20, "b": 20}


def test_a_request_goes_only_where_it_fits() -> None:
    direct = DirectSimulation(
        [plan("short", "all", max_model_len=700), plan("long", "all", max_model_len=4_000)]
    )
    records = direct.run(mixed_requests(100, rate_per_s=5.0, seed=4))
    assert len(records) == 100
    assert all(record.replica == "long" for record in records if record.prompt_tokens >= 700)


def test_a_request_that_fits_nowhere_is_rejected_aloud() -> None:
    direct = DirectSimulation([plan("short", "all", max_model_len=300)])
    with pytest.raises(ValueError, match="exceeds the context of all engines"):
        direct.run(mixed_requests(50, rate_per_s=5.0, seed=5))


def test_nothing_is_left_behind() -> None:
    direct = DirectSimulation([plan("a", "all", max_model_len=4_000)])
    direct.run(mixed_requests(100, rate_per_s=50.0, seed=6))
    assert not any(replica.model.has_work for replica in direct.replicas)
    assert len(direct.timeline) == 0
