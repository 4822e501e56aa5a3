from collections import Counter

import pytest

from serve_app.core.metrics.record import RequestRecord
from serve_app.lab.simulation.run import DirectSimulation
from serve_app.lab.simulation.simulation import SimulatedRequest
from tests.lab.simulation.builders import mixed_requests, plan, simulated


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


def test_a_bound_request_reaches_its_engine_only() -> None:
    requests = [simulated(f"r{number}", bound_to="b") for number in range(9)]
    direct = DirectSimulation([plan(name, "all", max_model_len=4_000) for name in "abc"])
    assert {record.replica for record in direct.run(requests)} == {"b"}


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
