from serve_app.core.routing.ledger import ReplicasByAdapter
from serve_app.core.routing.rate import DecayingRate
from serve_app.core.routing.replica_state import ReplicaState
from tests.builders import spec


def replica(replica_id: str, *adapters: str) -> ReplicaState:
    return ReplicaState(spec(replica_id, adapters=adapters), 0, DecayingRate(10.0, 0.0), kv_budget=100)


def test_a_removed_replica_is_not_found() -> None:
    by_adapter, one, two = ReplicasByAdapter(), replica("r1", "a", "b"), replica("r2", "b")
    by_adapter.add(one)
    by_adapter.add(two)
    by_adapter.remove(one)
    assert not by_adapter.of("a")
    assert list(by_adapter.of("b")) == [two]
    assert repr(by_adapter) == "<ReplicasByAdapter {'b': 1}>"
