"""A scheduler and a gateway that keep no receipts: all that is only for them is left out in this process.

The rest is the same code. So what differs is the book of receipts, the accounts of waits, and the times that
a gateway sends with the end of a request.
"""

from typing import Any

from serve_app.scheduling import commands, put_backs, scheduler
from serve_app.scheduling.waits.accounts import WaitAccounts
from serve_app.scheduling.waits.watch import WaitWatch
from serve_app.serving.channel.gateway_client import GatewayClient
from serve_app.serving.gateway.call_times import CallTimes
from serve_app.serving.scheduler.live_scheduler import LiveScheduler
from serve_app.serving.scheduler.receipts.book import ReceiptBook


def leave_receipts_out() -> None:
    """Do so in this process, before it makes a scheduler or a gateway."""
    for owner, names in (
        (ReceiptBook, ("on_arrival", "on_wait", "on_dispatch", "on_conclusion", "on_times")),
        (LiveScheduler, ("_note_wait",)),
        (WaitWatch, ("on_dispatch", "settle")),
        (WaitAccounts, ("add", "remove", "join")),
        (GatewayClient, ("note_end",)),
        (CallTimes, ("told",)),
    ):
        for name in names:
            if not hasattr(owner, name):
                raise AttributeError(f"{owner.__name__} has no {name} any more: look what receipts do now")
            setattr(owner, name, _nothing)
    for module in (commands, put_backs, scheduler):
        for name in ("wait_breakdown", "note_attempt"):
            if hasattr(module, name):
                setattr(module, name, _nothing)


def _nothing(*_: Any, **__: Any) -> None:
    return None
