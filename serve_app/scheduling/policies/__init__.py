"""Ordering policies, and the table that names them.

A policy answers two questions. Which length queue does a request wait in, and in what order inside it
(`queue_of`, `key`)? And which queue's head goes first now (`score`, `rank`)? `protocol.py` states the
contract; `tests/conformance` holds every policy to it.
"""

from collections.abc import Callable, Mapping

from serve_app.scheduling.policies.ewsjf import Ewsjf, EwsjfPaper
from serve_app.scheduling.policies.ewsjf_released import EwsjfReleased
from serve_app.scheduling.policies.fcfs import Fcfs, FcfsIsolated
from serve_app.scheduling.policies.hrrn import Hrrn
from serve_app.scheduling.policies.inputs import PolicyInputs
from serve_app.scheduling.policies.protocol import OrderingPolicy
from serve_app.scheduling.policies.sjf import Sjf, SjfAging
from serve_app.scheduling.policies.two_queue import TwoQueues
from serve_app.scheduling.policies.wspt_drr import WsptDrr

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
"""The policies of production by name; `serve_app.simulation.baselines` adds those for research."""


def make_policy(
    name: str, inputs: PolicyInputs | None = None, table: Mapping[str, MakePolicy] = POLICIES
) -> OrderingPolicy:
    """A new policy by its name.

    Raises:
        ValueError: there is no policy of that name in the table; the message lists those that are.
    """
    if name not in table:
        raise ValueError(f"unknown policy {name!r}: choose one of {', '.join(sorted(table))}")
    return table[name](inputs or PolicyInputs())


def learns_queues(name: str, table: Mapping[str, MakePolicy] = POLICIES) -> bool:
    """Whether the policy of that name queues by a learned partition."""
    return make_policy(name, table=table).learns_queues
