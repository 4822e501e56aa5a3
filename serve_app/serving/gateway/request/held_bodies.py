"""The bodies that a gateway holds, within a budget for all of them together.

A body is held from its first byte until it cannot be sent again: an answer has begun, or the request is over.
Many large ones may wait in the queue at once, so their sum is bounded. Whoever sends one more is told with
503 when the budget will have room, by the rate at which bodies are released. Small bodies may fill the last
quarter of the budget, so that a few clients with large ones do not shut everybody out.
"""

import asyncio

from serve_app.errors import Outcome
from serve_app.routing.rate import DecayingRate
from serve_app.serving.gateway.answer.responses import RequestRefused

# A body up to here is small; texts of ordinary chats are.
_SMALL_BYTES = 256 * 1024
_SHARE_OF_LARGE = 0.75
_RATE_S = 10.0
_LEAST_RETRY_S, _MOST_RETRY_S = 1.0, 60.0


class HeldBody:
    """One body.

    Attributes:
        data: its bytes; empty once it was released.
        whole_at: when its last byte had come, on the monotonic clock.
    """

    __slots__ = ("_budget", "_held_bytes", "data", "whole_at")

    def __init__(self, budget: "BodyBudget") -> None:
        self._budget = budget
        self._held_bytes = 0
        self.data: bytes = b""
        self.whole_at = 0.0

    def grow(self, size: int) -> None:
        """More of it has arrived.

        Raises:
            RequestRefused: the budget has no room for that.
        """
        self._budget.take(size, total=self._held_bytes + size)
        self._held_bytes += size

    def release(self) -> None:
        """It is not needed any more; calling it again does nothing."""
        self._budget.give_back(self._held_bytes)
        self._held_bytes, self.data = 0, b""


class BodyBudget:
    """The memory for bodies of one gateway.

    Attributes:
        held_bytes: of all bodies held now.
        max_bytes: what they may take together.
    """

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self._released: DecayingRate | None = None
        self.held_bytes = 0

    def __repr__(self) -> str:
        return f"<BodyBudget {self.held_bytes:,} of {self.max_bytes:,} bytes>"

    def take(self, size: int, *, total: int) -> None:
        """Hold so many bytes more, of a body that has `total` with them.

        Raises:
            RequestRefused: there is no room.
        """
        limit = self.max_bytes if total <= _SMALL_BYTES else int(self.max_bytes * _SHARE_OF_LARGE)
        if self.held_bytes + size > limit:
            raise RequestRefused(
                Outcome.REJECTED_QUEUE_FULL,
                f"this gateway holds {self.held_bytes:,} bytes of waiting requests and has no room for more: "
                "try again, or raise gateway.max_held_body_bytes",
                code="body_memory_full",
                status=503,
                retry_after_s=self._room_in_s(self.held_bytes + size - limit),
            )
        self.held_bytes += size

    def give_back(self, size: int) -> None:
        """Hold so many bytes less."""
        if not size:
            return
        self.held_bytes -= size
        now = asyncio.get_running_loop().time()
        if self._released is None:
            self._released = DecayingRate(_RATE_S, now)
        self._released.add(float(size), now)

    def _room_in_s(self, missing_bytes: int) -> float:
        now = asyncio.get_running_loop().time()
        per_s = self._released.per_s(now) if self._released is not None else 0.0
        return min(max(missing_bytes / per_s, _LEAST_RETRY_S), _MOST_RETRY_S) if per_s else _LEAST_RETRY_S
