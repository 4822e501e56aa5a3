"""What a scheduler says about itself, for people and programs: its queue, and its replicas."""

from collections.abc import Collection, Mapping
from dataclasses import asdict
from typing import Any

from serve_app.request import PriorityClass
from serve_app.routing.replica import ReplicaReport, ReplicaSpec
from serve_app.scheduling import Scheduler
from serve_app.serving.scheduler.dashboard.overview import reserved


def queue_document(core: Scheduler, now: float, most: int) -> dict[str, Any]:
    """Who waits where, for how long, and why, with at most so many sub-queues."""
    settings, snapshot = core.settings, core.queue_snapshot(now, most)
    served = {priority.value: dict(counters) for priority, counters in snapshot.served.items() if counters}
    return {
        "model": settings.model,
        "policy": settings.policy,
        "waiting": len(core.queue),
        "in_backoff": len(core.queue.resting),
        "max_waiting": settings.max_waiting,
        "queue_timeout_s": {
            priority.value: settings.queue_timeout_s.of(priority) for priority in PriorityClass
        },
        "length_queues": [asdict(each) for each in snapshot.length_queues],
        "sub_queues": [asdict(each) for each in snapshot.sub_queues],
        "sub_queues_left_out": snapshot.left_out,
        "b_short_tokens": snapshot.b_short_tokens,
        "served": served,
    }


def replica_documents(
    core: Scheduler,
    reports: Mapping[str, tuple[ReplicaSpec, ReplicaReport | None]],
    in_flight: Mapping[str, int],
    stale: Collection[str],
) -> dict[str, Any]:
    """What is known of each replica, and what is reserved of it.

    Args:
        in_flight: requests on each replica, as gateways tell.
        stale: replicas whose last report is too old.
    """
    return {
        replica_id: {
            **asdict(spec),
            **_context_of(core, replica_id, spec),
            "in_flight": in_flight.get(replica_id, 0),
            "report": asdict(report) if report else None,
            **reserved(core.ledger.get(replica_id)),
            "stale": replica_id in stale,
        }
        for replica_id, (spec, report) in reports.items()
    }


def _context_of(core: Scheduler, replica_id: str, spec: ReplicaSpec) -> dict[str, int | None]:
    """The context limit of a replica that does not tell it, as far as it has been learned."""
    if spec.tells_context:
        return {}
    state = core.ledger.get(replica_id)
    learned = state.context.limit_tokens if state is not None and state.context is not None else None
    return {"max_model_len": None, "learned_context_tokens": learned}
