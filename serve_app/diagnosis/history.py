"""What has gone wrong since the schedulers started, from their counters."""

from collections.abc import Iterator

from serve_app.diagnosis.inspection import Inspection
from serve_app.diagnosis.trouble import Severity, Trouble

_CONCLUDED = "ewsjf_requests_concluded_total"
# Below so many requests a share says nothing.
_FEW = 20
# Each: outcome, the share of all requests above which it is told, what it means, what to do.
_OUTCOMES = (
    (
        "failed",
        0.01,
        "failed in an engine (502)",
        "the gateways' log has the engine's words (`outcome=failed`); then see the engine's log",
    ),
    (
        "expired",
        0.01,
        "ended in the queue when their timeout was over (504)",
        "add replicas (`plan` says how many), or let clients wait longer (queue_timeout_s)",
    ),
    (
        "rejected_queue_full",
        0.01,
        "were refused because the queue was full (429)",
        "add replicas (`plan` says how many); clients should come again after Retry-After",
    ),
    (
        "rejected_no_replica",
        0.0,
        "were refused because no replica was alive (503)",
        "see why engines ended in their logs; a second replica covers for the first",
    ),
)
_PUT_BACK_SHARE = 0.01


def outcomes(seen: Inspection, model: str) -> Iterator[Trouble]:
    """Requests that did not get what they came for."""
    all_of_them = seen.total(_CONCLUDED, model)
    for outcome, share, meaning, step in _OUTCOMES:
        count = seen.total(_CONCLUDED, model, outcome=outcome)
        if count > share * all_of_them and all_of_them >= _FEW:
            yield Trouble(
                Severity.RISK,
                f"model {model}: since its scheduler started, {count:,.0f} of {all_of_them:,.0f} requests "
                f"{meaning}",
                step,
            )


def put_backs(seen: Inspection, model: str) -> Iterator[Trouble]:
    """Requests that came back from replicas before their first byte."""
    sent = seen.total("ewsjf_dispatches_total", model)
    back = seen.total("ewsjf_put_backs_total", model)
    if sent >= _FEW and back > _PUT_BACK_SHARE * sent:
        yield Trouble(
            Severity.RISK,
            f"model {model}: {back:,.0f} of {sent:,.0f} dispatches came back before their first byte",
            "ewsjf_put_backs_total says why by its label `failure`; then see the engine's log",
        )


def errors(seen: Inspection, model: str) -> Iterator[Trouble]:
    """Faults of the scheduler itself, and of the store for what it learns."""
    if count := seen.total("ewsjf_scheduler_errors_total", model):
        yield Trouble(
            Severity.RISK,
            f"model {model}: its scheduler could not handle {count:,.0f} events",
            "see `event=core_failed` in its log, and report it with the lines below",
        )
    for operation, verb in (("save", "written"), ("load", "read"), ("restore", "used")):
        count = seen.total("ewsjf_state_failures_total", model, operation=operation)
        if count:
            yield Trouble(
                Severity.RISK,
                f"model {model}: {count:,.0f} times learned state could not be {verb}",
                "see whether state_uri can be reached and written to from every node",
            )
