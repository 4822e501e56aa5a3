from collections import Counter

import pytest

from serve_app.core.metrics.record import RequestRecord
from serve_app.lab.simulation.direct import Balance, DirectSimulation
from serve_app.lab.simulation.simulation import SimulatedRequest
from tests.lab.simulation.builders import mixed_requests, plan, simulated


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


def three(balance: Balance) -> DirectSimulation:
    return DirectSimulation([plan(name, "all", max_model_len=4_000) for name in "abc"], balance)


def served(records: list[RequestRecord]) -> dict[str, str]:
    return {record.request_id: record.replica for record in records}


def test_a_session_stays_on_its_engine_whatever_the_load() -> None:
    requests = [
        simulated(f"{session}-{turn}", at=0.1 * turn, session=f"s{session}")
        for session in range(30)
        for turn in range(4)
    ]
    chosen = served(three(Balance.SESSION_HASH).run(requests))
    for session in range(30):
        assert len({chosen[f"{session}-{turn}"] for turn in range(4)}) == 1
    assert set(chosen.values()) == set("abc")


def test_sessions_are_hashed_among_the_engines_that_are_able() -> None:
    plans = [plan("short", "all", max_model_len=200), plan("long", "all", max_model_len=4_000)]
    requests = [simulated(f"r{number}", prompt_tokens=1_000, session=f"s{number}") for number in range(10)]
    assert set(served(DirectSimulation(plans, Balance.SESSION_HASH).run(requests)).values()) == {"long"}


def test_kv_overlap_prefers_the_engine_that_has_the_prompt_cached() -> None:
    first, following = tuple(range(1_000, 1_020)), tuple(range(1_000, 1_025))
    requests = [
        simulated("first", prompt_tokens=320, blocks=first),
        simulated("other", prompt_tokens=320, blocks=tuple(range(20)), at=0.001),
        simulated("next", prompt_tokens=400, blocks=following, at=5.0),
        simulated("again", prompt_tokens=400, blocks=following, at=10.0),
    ]
    direct = three(Balance.KV_OVERLAP)
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
    chosen = served(DirectSimulation(plans, Balance.KV_OVERLAP).run(requests))
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
    chosen = served(DirectSimulation(plans, Balance.KV_OVERLAP).run(requests))
    # On b it costs 330 + 330 tokens. On a, 10 + 330 and 150, or 10 + 330, 100 and twice 150.
    assert chosen["next"] == ("b" if step_tokens else "a")


def test_kv_overlap_alternates_between_equal_engines() -> None:
    requests = [simulated(f"r{number}", at=10.0 * number) for number in range(6)]
    records = three(Balance.KV_OVERLAP).run(requests)
    assert [record.replica for record in records] == ["a", "b", "c"] * 2


@pytest.mark.parametrize("balance", Balance)
def test_a_bound_request_reaches_its_engine_only(balance: Balance) -> None:
    requests = [simulated(f"r{number}", bound_to="b", session=f"s{number}") for number in range(9)]
    assert set(served(three(balance).run(requests)).values()) == {"b"}


def test_each_end_is_reported_once_with_its_record() -> None:
    ended: list[tuple[SimulatedRequest, RequestRecord]] = []
    direct = DirectSimulation(
        [plan("a", "all", max_model_len=4_000)],
        on_end=lambda simulated, record: ended.append((simulated, record)),
    )
    requests = mixed_requests(40, rate_per_s=10.0, seed=6)
    records = direct.run(requests)
    assert [record for _, record in ended] == records
    assert [one.request.request_id for one, _ in ended] == [record.request_id for _, record in ended]
    assert sorted(map(id, (one for one, _ in ended))) == sorted(map(id, requests))


def test_requests_may_be_submitted_at_the_end_of_another() -> None:
    arrived: list[float] = []

    def follow(ended: SimulatedRequest, record: RequestRecord) -> None:
        arrived.append(record.finished_at)
        if len(arrived) == 1:
            direct.submit(simulated("later", at=record.finished_at + 2.0))
            # Its arrival has passed: it reaches an engine now, and has waited since.
            direct.submit(simulated("late", at=record.arrived_at))

    direct = DirectSimulation([plan("a", "all")], on_end=follow)
    records = {record.request_id: record for record in direct.run([simulated("first", at=1.0)])}
    assert records["later"].arrived_at == records["later"].dispatched_at == arrived[0] + 2.0
    assert (records["late"].arrived_at, records["late"].dispatched_at) == (1.0, arrived[0])
    assert records["late"].queue_wait_s == arrived[0] - 1.0
