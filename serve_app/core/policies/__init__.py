"""Ordering policies and their registry.

A policy assigns requests to length queues and orders them there (`queue_of`, `key`), and decides which
queue's head is dispatched first (`score`, `rank`). `protocol` defines the contract, and `tests/conformance`
tests every policy against it. A new policy needs one file and one line in the table.
"""

from collections.abc import Callable, Mapping

from serve_app.core.policies.classic import Fcfs, FcfsIsolated, Hrrn, Sjf, SjfAging
from serve_app.core.policies.ewsjf import Ewsjf, EwsjfPaper
from serve_app.core.policies.ewsjf_released import EwsjfReleased
from serve_app.core.policies.protocol import OrderingPolicy, PolicyInputs
from serve_app.core.policies.two_queue import TwoQueues
from serve_app.core.policies.wspt_drr import WsptDrr

MakePolicy = Callable[[PolicyInputs], OrderingPolicy]

POLICIES: Mapping[str, MakePolicy] = {
    "fcfs": lambda _: Fcfs(),
    "fcfs-isolated": lambda _: FcfsIsolated(),
    "sjf": lambda _: Sjf(),
    "sjf-aging": lambda _: SjfAging(),
    "hrrn": Hrrn,
    "wspt-drr": lambda _: WsptDrr(),
    "two-queue": lambda _: TwoQueues(),
    "ewsjf-released": lambda _: EwsjfReleased(),
    "ewsjf-paper": EwsjfPaper,
    "ewsjf": Ewsjf,
}
"""The policies by name; `serve_app.lab.simulation.baselines` adds research baselines."""


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
