from collections import Counter

import pytest

from experiments.agents.baselines import KvOverlap, SessionHash
from experiments.common.load_balancers import PowerOfTwo, RoundRobin
from serve_app.core.metrics.record import RequestRecord
from serve_app.lab.simulation.run import DirectSimulation
from tests.lab.simulation.builders import mixed_requests, plan, simulated


def test_round_robin_gives_every_engine_its_turn() -> None:
    direct = RoundRobin([plan(name, "all", max_model_len=8_000) for name in "abc"])
    records = direct.run(mixed_requests(90, rate_per_s=5.0, seed=1))
    assert Counter(record.replica for record in records) == {"a": 30, "b": 30, "c": 30}


def test_power_of_two_prefers_the_less_busy_of_those_it_draws() -> None:
    plans = [plan(name, "all", max_model_len=8_000) for name in "abcd"]
    requests = mixed_requests(200, rate_per_s=8.0, seed=2)
    records = PowerOfTwo(plans).run(requests)
    served = Counter(record.replica for record in records)
    assert set(served) == set("abcd")
    # Random choice would leave them further apart, round robin would leave them equal.
    assert 0 < max(served.values()) - min(served.values()) < 40
    again = PowerOfTwo(plans).run(mixed_requests(200, rate_per_s=8.0, seed=2))
    assert again == records


def three(balancer: type[DirectSimulation]) -> DirectSimulation:
    return balancer([plan(name, "all", max_model_len=4_000) for name in "abc"])


def served(records: list[RequestRecord]) -> dict[str, str]:
    return {record.request_id: record.replica for record in records}


def test_a_session_stays_on_its_engine_whatever_the_load() -> None:
    requests = [
        simulated(f"{session}-{turn}", at=0.1 * turn, session=f"s{session}")
        for session in range(30)
        for turn in range(4)
    ]
    chosen = served(three(SessionHash).run(requests))
    for session in range(30):
        assert len({chosen[f"{session}-{turn}"] for turn in range(4)}) == 1
    assert set(chosen.values()) == set("abc")


def test_sessions_are_hashed_among_the_engines_that_are_able() -> None:
    plans = [plan("short", "all", max_model_len=200), plan("long", "all", max_model_len=4_000)]
    requests = [simulated(f"r{number}", prompt_tokens=1_000, session=f"s{number}") for number in range(10)]
    assert set(served(SessionHash(plans).run(requests)).values()) == {"long"}


def test_kv_overlap_prefers_the_engine_that_has_the_prompt_cached() -> None:
    first, following = tuple(range(1_000, 1_020)), tuple(range(1_000, 1_025))
    requests = [
        simulated("first", prompt_tokens=320, blocks=first),
        simulated("other", prompt_tokens=320, blocks=tuple(range(20)), at=0.001),
        simulated("next", prompt_tokens=400, blocks=following, at=5.0),
        simulated("again", prompt_tokens=400, blocks=following, at=10.0),
    ]
    direct = three(KvOverlap)
    chosen = served(direct.run(requests))
    assert chosen["next"] == chosen["again"] == chosen["first"] != chosen["other"]
    # All of the last prompt is cached, so its last block is computed again.
    assert sum(replica.prefilled_tokens for replica in direct.replicas) == 320 + 320 + 80 + 16


@pytest.mark.parametrize(("busy_tokens", "stays"), [(300, True), (340, False)])
def test_kv_overlap_weighs_cached_blocks_against_blocks_in_use(busy_tokens: int, stays: bool) -> None:
    blocks = tuple(range(20))
    requests = [
        simulated("first", prompt_tokens=320, output_tokens=2, blocks=blocks, bound_to="a"),
        # It decodes on the same engine when the next request arrives.
        simulated("busy", prompt_tokens=busy_tokens, output_tokens=200, at=5.0, bound_to="a"),
        simulated("next", prompt_tokens=330, blocks=blocks, at=6.0),
    ]
    plans = [plan(name, "all", max_model_len=4_000) for name in "ab"]
    chosen = served(KvOverlap(plans).run(requests))
    # 10 tokens to prefill and the active ones on a; 330 tokens to prefill on b.
    assert (chosen["next"] == "a") is stays


@pytest.mark.parametrize("step_tokens", [0, 100])
def test_kv_overlap_counts_a_waiting_prompt_as_prefill_and_as_active(step_tokens: int) -> None:
    blocks = tuple(range(20))
    requests = [
        simulated("first", prompt_tokens=320, output_tokens=2, blocks=blocks, bound_to="a"),
        # If there is a step in progress, the prompt behind it waits. Otherwise it is in the step itself.
        *([simulated("step", prompt_tokens=step_tokens, at=5.0, bound_to="a")] if step_tokens else []),
        simulated("prompt", prompt_tokens=150, output_tokens=200, at=5.001, bound_to="a"),
        simulated("next", prompt_tokens=330, blocks=blocks, at=5.002),
    ]
    plans = [plan(name, "all", max_model_len=4_000) for name in "ab"]
    chosen = served(KvOverlap(plans).run(requests))
    # On b it costs 330 + 330 tokens. On a, 10 + 330 and 150, or 10 + 330, 100 and twice 150.
    assert chosen["next"] == ("b" if step_tokens else "a")


def test_kv_overlap_alternates_between_equal_engines() -> None:
    requests = [simulated(f"r{number}", at=10.0 * number) for number in range(6)]
    records = three(KvOverlap).run(requests)
    assert [record.replica for record in records] == ["a", "b", "c"] * 2


@pytest.mark.parametrize("balancer", [RoundRobin, PowerOfTwo, SessionHash, KvOverlap])
def test_a_bound_request_reaches_its_engine_only(balancer: type[DirectSimulation]) -> None:
    requests = [simulated(f"r{number}", bound_to="b", session=f"s{number}") for number in range(9)]
    assert set(served(three(balancer).run(requests)).values()) == {"b"}
