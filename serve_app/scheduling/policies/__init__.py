"""Ordering policies, one file each, and the table that names them.

A policy answers two questions. Which length queue does a request wait in, and in what order inside it
(`queue_of`, `key`)? And which queue's head goes first now (`score`)? `protocol.py` states the contract;
`tests/conformance` holds every policy to it.
"""

from collections.abc import Callable

from serve_app.scheduling.policies.fcfs import Fcfs, FcfsIsolated
from serve_app.scheduling.policies.protocol import OrderingPolicy

POLICIES: dict[str, Callable[[], OrderingPolicy]] = {
    "fcfs": Fcfs,
    "fcfs-isolated": FcfsIsolated,
}


def make_policy(name: str) -> OrderingPolicy:
    """A new policy by its name.

    Raises:
        ValueError: there is no policy of that name; the message lists those that are.
    """
    try:
        return POLICIES[name]()
    except KeyError:
        raise ValueError(f"unknown policy {name!r}: choose one of {', '.join(sorted(POLICIES))}") from None
