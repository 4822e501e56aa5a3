"""LoRA adapters: which replicas have one at hand.

An engine lists more adapters than it has in its GPU's memory. One that it did not use lately is copied there
first, and pushes another out. So among the replicas that list an adapter, those are preferred that were sent
it lately. A preference only: where they are clearly busier than others, the copy costs less than the wait.
"""

from collections.abc import Sequence

from serve_app.routing.replica_state import ReplicaState

# About as many as engines are set up to have in GPU memory; vLLM's own default is one.
_AT_HAND = 4
# Requests in flight that a copy is worth.
_MOST_AHEAD = 4


def note_adapter(state: ReplicaState, adapter: str) -> None:
    """A replica is sent a request for an adapter."""
    others = [each for each in state.recent_adapters if each != adapter]
    state.recent_adapters = (adapter, *others[: _AT_HAND - 1])


def where_warm(fitting: Sequence[ReplicaState], adapter: str) -> list[ReplicaState]:
    """Those that have the adapter at hand, and are not clearly busier than others; else all."""
    least = min((state.in_flight for state in fitting), default=0)
    warm = [
        state
        for state in fitting
        if adapter in state.recent_adapters and state.in_flight <= least + _MOST_AHEAD
    ]
    return warm or list(fitting)
