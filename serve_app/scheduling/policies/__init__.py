"""Ordering policies, and the table that names them.

A policy answers two questions. Which length queue does a request wait in, and in what order inside it
(`queue_of`, `key`)? And which queue's head goes first now (`score`, `rank`)? `protocol.py` states the
contract; `tests/conformance` holds every policy to it.
"""

from collections.abc import Callable

from serve_app.scheduling.policies.classes import TwoQueues, WsptDrr
from serve_app.scheduling.policies.ewsjf import Ewsjf, EwsjfPaper
from serve_app.scheduling.policies.ewsjf_released import EwsjfReleased
from serve_app.scheduling.policies.fcfs import Fcfs, FcfsIsolated, Random
from serve_app.scheduling.policies.inputs import PolicyInputs
from serve_app.scheduling.policies.protocol import OrderingPolicy
from serve_app.scheduling.policies.shortest import Hrrn, Oracle, Sjf, SjfAging

POLICIES: dict[str, Callable[[PolicyInputs], OrderingPolicy]] = {
    "fcfs": lambda _: Fcfs(),
    "fcfs-isolated": lambda _: FcfsIsolated(),
    "random": lambda _: Random(),
    "sjf": lambda _: Sjf(),
    "sjf-aging": lambda _: SjfAging(),
    "hrrn": Hrrn,
    "wspt-drr": lambda _: WsptDrr(),
    "two-queue": lambda _: TwoQueues(),
    "ewsjf-released": lambda _: EwsjfReleased(),
    "ewsjf-paper": EwsjfPaper,
    "ewsjf": Ewsjf,
    # Sees what nobody can know; for simulations only.
    "oracle": lambda _: Oracle(),
}


def make_policy(name: str, inputs: PolicyInputs | None = None) -> OrderingPolicy:
    """A new policy by its name.

    Raises:
        ValueError: there is no policy of that name; the message lists those that are.
    """
    if name not in POLICIES:
        raise ValueError(f"unknown policy {name!r}: choose one of {', '.join(sorted(POLICIES))}")
    return POLICIES[name](inputs or PolicyInputs())


def learns_queues(name: str) -> bool:
    """Whether the policy of that name queues by a learned partition."""
    return make_policy(name).learns_queues
