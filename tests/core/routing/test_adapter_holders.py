from serve_app.core.routing.ledger import AdapterHolders
from serve_app.core.routing.rate import DecayingRate
from serve_app.core.routing.replica_state import ReplicaState
from tests.builders import spec


def replica(replica_id: str, *adapters: str) -> ReplicaState:
    return ReplicaState(spec(replica_id, adapters=adapters), 0, DecayingRate(10.0, 0.0), kv_budget=100)


def test_a_removed_holder_is_not_found() -> None:
    holders, one, two = AdapterHolders(), replica("r1", "a", "b"), replica("r2", "b")
    holders.add(one)
    holders.add(two)
    holders.remove(one)
    assert not holders.of("a")
    assert list(holders.of("b")) == [two]
    assert repr(holders) == "<AdapterHolders {'b': 1}>"
