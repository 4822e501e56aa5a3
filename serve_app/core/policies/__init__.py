"""Ordering policies and their registry.

A policy assigns requests to length queues and orders them there (`queue_of`, `key`), and decides which
queue's head is dispatched first (`score`, `rank`). Read `protocol` (the contract, against which
`tests/conformance` tests every policy), `classic` (short examples), `length_queues` (the learned partition)
and `ewsjf`. A new policy needs one file and one line in the table.
"""

from collections.abc import Callable, Mapping

from serve_app.core.policies.classic import Fcfs, FcfsIsolated, SjfAging
from serve_app.core.policies.ewsjf import Ewsjf
from serve_app.core.policies.protocol import OrderingPolicy, PolicyInputs

MakePolicy = Callable[[PolicyInputs], OrderingPolicy]

POLICIES: Mapping[str, MakePolicy] = {
    "ewsjf": Ewsjf,
    "fcfs": lambda _: Fcfs(),
    "fcfs-isolated": lambda _: FcfsIsolated(),
    "sjf-aging": lambda _: SjfAging(),
}
"""The policies by name; `serve_app.lab.simulation.baselines` adds those for comparisons."""


def make_policy(
    name: str, inputs: PolicyInputs | None = None, table: Mapping[str, MakePolicy] = POLICIES
) -> OrderingPolicy:
    """Return a new policy by name.

    Raises:
        ValueError: no policy has that name; the message lists the table.
    """
    if name not in table:
        raise ValueError(f"unknown policy {name!r}: choose one of {', '.join(sorted(table))}")
    return table[name](inputs or PolicyInputs())


def learns_queues(name: str, table: Mapping[str, MakePolicy] = POLICIES) -> bool:
    """Return whether the policy of that name uses the learned partition."""
    return make_policy(name, table=table).learns_queues
