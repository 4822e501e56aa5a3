"""Schedulers and replicas: who does not answer, and whose report is too old."""

from collections.abc import Iterator

from serve_app.command import program
from serve_app.diagnosis.inspection import Document
from serve_app.diagnosis.trouble import Severity, Trouble


def scheduler(model: Document) -> Iterator[Trouble]:
    """Whether the scheduler of a model answers and schedules."""
    name = model["model"]
    if "error" in model:
        yield Trouble(
            Severity.DOWN,
            f"model {name}: {model['error']}; new requests wait until it is back",
            "it is replaced by itself within seconds: ask again, then see the logs of its scheduler",
        )
    elif model["ended"]:
        yield Trouble(
            Severity.DEGRADED,
            f"model {name}: its scheduler has ended: {model['ended']}",
            "another one takes over by itself: ask again in some seconds",
        )


def reports(model: Document) -> Iterator[Trouble]:
    """Replicas whose load is not known; they get no requests meanwhile."""
    replicas = model["replicas"]
    stale = sorted(name for name, replica in replicas.items() if replica["stale"])
    silent = sorted(name for name, replica in replicas.items() if replica["report"] is None)
    late = sorted({*stale, *silent})
    if not late:
        return
    everyone = len(late) == len(replicas)
    yield Trouble(
        Severity.DOWN if everyone else Severity.DEGRADED,
        f"model {model['model']}: {len(late)} of {len(replicas)} replicas have no fresh report, so they get "
        f"no requests: {', '.join(late)}",
        "a blocked engine is replaced after its health check: see its log and its machine's load",
    )


def pools(model: Document) -> Iterator[Trouble]:
    """Pools that have no replica, while another pool of the model has one and takes their requests."""
    has = {replica["pool"] for replica in model["replicas"].values()}
    for pool in model.get("pools", ()):
        if has and pool not in has:
            yield Trouble(
                Severity.DEGRADED,
                f"model {model['model']}: pool {pool} has no replica: its requests wait or go to the other",
                "a replica that starts joins by itself; if none comes, see the logs of its engine",
            )


def tuner(model: Document) -> Iterator[Trouble]:
    """A tuner that somebody froze."""
    frozen = (model.get("tuner") or {}).get("frozen")
    if frozen:
        yield Trouble(
            Severity.NOTE,
            f"model {model['model']}: the tuner is {frozen}",
            f"let it go on: {program()} status --thaw-tuner",
        )


def decision_log(model: Document) -> Iterator[Trouble]:
    """A decision log that has ended while the scheduler goes on."""
    reason = model.get("decision_log_ended")
    if reason:
        yield Trouble(
            Severity.NOTE,
            f"model {model['model']}: the decision log has ended: {reason}",
            "nothing more is recorded until a new scheduler starts: raise max_events, or free the disk",
        )
