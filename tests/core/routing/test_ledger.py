"""Replica ledger: queries over replicas, and replicas that leave. Histories: tests/properties."""

import pytest

from serve_app.core.routing.ledger import ReplicaLedger
from serve_app.core.routing.replica_state import Hold, ReplicaState
from tests.builders import report, spec
from tests.core.routing.prefix.test_affinity import NoBackpressure


def ledger(*replica_ids: str, pool: str = "short") -> ReplicaLedger:
    made = ReplicaLedger(backpressure=NoBackpressure(), report_limit_s=10)
    for replica_id in replica_ids:
        made.join(spec(replica_id, pool), 0.0)
        made.report(replica_id, report(), 0.0)
    return made


def test_the_freest_usable_replica_of_a_pool_is_found_and_ties_go_to_the_first() -> None:
    made = ledger("a", "b", "c")
    made.join(spec("other", "long", kv_tokens=10**6), 0.0)
    made.report("other", report(), 0.0)
    assert made.most_free("short") is made["a"]
    made.hold("a", Hold(10), 0.0)
    assert made.most_free("short") is made["b"]
    made.hold("b", Hold(20), 0.0)
    made.suspend(made["c"], 0.0)
    assert made.most_free("short") is made["a"]
    assert made.most_free("nowhere") is None


def test_the_loss_of_a_lost_or_unknown_replica_is_ignored() -> None:
    made = ledger("a", "b")
    made.hold("a", Hold(10), 0.0)
    made.lose("a", 0.0)
    made.lose("a", 0.0)
    made.lose("unknown", 0.0)
    assert made.connected_count == 1
    assert made["a"].joined is False
    made.release("a", Hold(10), 3.0, started=False)
    assert made.get("a") is None


def test_a_lost_replica_has_no_report_to_expire() -> None:
    made = ledger("a")
    assert made.next_report_expiry() == 10.0
    made.lose("a", 0.0)
    assert made.next_report_expiry() is None
    assert made.expire_reports(100.0) == []
    # A replica that joined and never reported can leave, too.
    silent = ReplicaLedger(backpressure=NoBackpressure(), report_limit_s=10)
    silent.join(spec("s"), 0.0)
    silent.lose("s", 0.0)
    assert silent.connected_count == 0


def test_whether_a_pool_is_alive_costs_the_same_in_a_large_fleet(monkeypatch: pytest.MonkeyPatch) -> None:
    made = ledger(*(f"s{number}" for number in range(200)))
    for number in range(200):
        made.join(spec(f"l{number}", "long"), 0.0)
    # Only the last replica of each pool is alive: finding it must examine all others.
    made.report("l199", report(), 0.0)
    for number in range(199):
        made.lose(f"s{number}", 0.0)
    assert made.has_alive("short")
    assert made.has_alive("long")
    looks = 0
    is_alive: property = vars(ReplicaState)["is_alive"]

    def counted(state: ReplicaState) -> bool:
        nonlocal looks
        looks += 1
        return bool(is_alive.__get__(state))

    monkeypatch.setattr(ReplicaState, "is_alive", property(counted))
    for _report in range(100):
        assert made.has_alive("short")
        assert made.has_alive("long")
    assert looks <= 400


def test_the_smallest_context_limit_of_a_pool_follows_its_replicas() -> None:
    made = ledger()
    made.join(spec("a", "short", max_model_len=4_000), 0.0)
    made.join(spec("b", "short", max_model_len=2_000), 0.0)
    assert (made.context_limit("short"), made.contexts.changes) == (2_000, 2)
    made.join(spec("c", "short", max_model_len=9_000), 0.0)
    assert made.contexts.changes == 2
    made.lose("b", 0.0)
    assert made.context_limit("short") == 4_000
    made.join(spec("a", "long", max_model_len=4_000), 0.0)
    assert (made.context_limit("short"), made.context_limit("long")) == (9_000, 4_000)
    assert [state.spec.replica_id for state in made.of_pool("long")] == ["a"]
    made.lose("c", 0.0)
    assert made.context_limit("short") is None


def test_the_smallest_kv_cache_of_a_pool_follows_its_replicas() -> None:
    made = ledger()
    assert made.smallest_kv_budget("short") == 0
    made.join(spec("a", "short", kv_tokens=50_000, max_model_len=100), 0.0)
    made.join(spec("b", "short", kv_tokens=20_000, max_model_len=100), 0.0)
    assert made.smallest_kv_budget("short") == 20_000
    # It restarts with a larger cache.
    made.join(spec("b", "short", kv_tokens=90_000, max_model_len=100), 1.0)
    assert made.smallest_kv_budget("short") == 50_000
    made.join(spec("a", "long", kv_tokens=50_000, max_model_len=100), 2.0)
    assert (made.smallest_kv_budget("short"), made.smallest_kv_budget("long")) == (90_000, 50_000)
    made.lose("b", 0.0)
    assert made.smallest_kv_budget("short") == 0
