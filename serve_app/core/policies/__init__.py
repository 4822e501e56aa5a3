"""Ordering policies, and the table that names them.

A policy decides in which length queue a request waits and in what order (`queue_of`, `key`), and which
queue's head is dispatched first (`score`, `rank`). `protocol` states the contract, and `tests/conformance`
tests every policy against it. A new policy is one file and one line in the table.
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
"""The policies by name; `serve_app.lab.simulation.baselines` adds research baselines to them."""


def make_policy(
    name: str, inputs: PolicyInputs | None = None, table: Mapping[str, MakePolicy] = POLICIES
) -> OrderingPolicy:
    """A new policy by its name.

    Raises:
        ValueError: there is no policy of that name; the message lists the table.
    """
    if name not in table:
        raise ValueError(f"unknown policy {name!r}: choose one of {', '.join(sorted(table))}")
    return table[name](inputs or PolicyInputs())


def learns_queues(name: str, table: Mapping[str, MakePolicy] = POLICIES) -> bool:
    """Whether the policy of that name queues by a learned partition."""
    return make_policy(name, table=table).learns_queues
