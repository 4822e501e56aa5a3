"""Which replicas list each LoRA adapter, so that a request for one is not compared with the whole fleet."""

from collections.abc import Collection

from serve_app.routing.replica_state import ReplicaState


class AdapterHolders:
    """The replicas of a ledger by the adapters that they list, those that are lost but not done with them."""

    def __init__(self) -> None:
        self._by_adapter: dict[str, dict[str, ReplicaState]] = {}

    def add(self, state: ReplicaState) -> None:
        """Note what a replica lists."""
        for adapter in state.spec.adapters:
            self._by_adapter.setdefault(adapter, {})[state.spec.replica_id] = state

    def remove(self, state: ReplicaState) -> None:
        """Forget it, before it lists others or is gone."""
        for adapter in state.spec.adapters:
            holders = self._by_adapter[adapter]
            del holders[state.spec.replica_id]
            if not holders:
                del self._by_adapter[adapter]

    def of(self, adapter: str) -> Collection[ReplicaState]:
        """The replicas that list an adapter."""
        holders = self._by_adapter.get(adapter)
        return () if holders is None else holders.values()

    def __repr__(self) -> str:
        return f"<AdapterHolders { ({name: len(holders) for name, holders in self._by_adapter.items()}) }>"
