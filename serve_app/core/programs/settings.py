"""Settings of the scheduling of programs."""

import enum
from typing import Annotated

from serve_app.core.settings_base import INTERNAL, NOT_NEGATIVE, settings


class ProgramOrder(enum.StrEnum):
    """Order among the waiting programs of a tenant."""

    FCFS = "fcfs"
    """The program that started first."""
    LEAST_SERVICE = "least-service"
    """The program with the least attained service."""


@settings(block="programs")
class ProgramsSettings:
    """Scheduling of agent programs: conversations of many turns, with their sub-agents."""

    # Disable it to schedule each request by itself.
    enabled: bool = True
    # Order among programs that wait for KV cache. `least-service` lets programs that have used little pass
    # those that have used much.
    order: ProgramOrder = ProgramOrder.FCFS
    # Whether turns wait for room in the KV cache.
    residency: Annotated[bool, INTERNAL] = True
    # Whether a turn waits for the replica of its context.
    stay: Annotated[bool, INTERNAL] = True
    # Whether the last open sub-agent of a program is served first.
    joins: Annotated[bool, INTERNAL] = True
    # Factor on the learned time for which contexts are retained; 0 retains none.
    retention: Annotated[float, NOT_NEGATIVE, INTERNAL] = 1.0
