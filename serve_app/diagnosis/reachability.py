"""Whether the application answers at all, and whether it is ours."""

from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

from serve_app.checking.machine import holder
from serve_app.command import program
from serve_app.diagnosis.inspection import Inspection
from serve_app.diagnosis.trouble import Severity, Trouble
from serve_app.errors import ServeAppError
from serve_app.launch.failures.reason import engine_cause
from serve_app.launch.instance import Instance
from serve_app.settings.loading import load_settings

_HERE = {"127.0.0.1", "localhost", "::1", "0.0.0.0"}  # noqa: S104 - looked up, not bound
# More than a network takes; certificates, keys and logs of several machines disagree then.
_SKEW_S = 30.0


def why_silent(url: str, reason: str, running: list[Instance]) -> Trouble:
    """What is known where nothing answers."""
    what = f"nothing answers at {url}: {reason}"
    if mine := next((each for each in running if each.url == url), None):
        return Trouble(
            Severity.DOWN,
            f"{what}; the application of {mine.config} starts there, or is about to end",
            f"wait for it; its terminal says how far it is, and the whole story is in {mine.folder}",
        )
    if held := _held(url):
        return Trouble(
            Severity.DOWN,
            f"{what}, though its port is taken{held}",
            "if that is the application, it hangs or starts: see its logs; if not, end it or give --url",
        )
    if running:
        known = ", ".join(f"{each.url} ({each.config})" for each in running)
        return Trouble(Severity.DOWN, what, f"applications run here at {known}: give --url")
    return Trouble(Severity.DOWN, what, f"start it: {program()} serve CONFIG; or give its --url")


def is_ours(seen: Inspection) -> bool:
    """Whether a gateway of this project answers."""
    document = seen.ready.document() or {}
    return "models_without_replica" in document


def why_foreign(url: str, seen: Inspection, running: list[Instance]) -> Trouble:
    """Something answers that is no gateway."""
    mine = next((each for each in running if each.url == url), None)
    if mine is not None or seen.health.status in {502, 503, 504}:
        folder = f" in {mine.folder}" if mine is not None else ""
        return Trouble(
            Severity.DOWN,
            f"a front end answers at {url} with {seen.health.status}, and no gateway behind it does",
            f"wait if it was just started; otherwise see the logs{folder}, and start it anew",
        )
    return Trouble(
        Severity.DOWN,
        f"what answers at {url}{_held(url)} is no application of this project (/ready: {seen.ready.status})",
        "give the application's own address by --url, or its prefix when it is served below one",
    )


def unready(seen: Inspection, mine: Instance | None) -> Iterator[Trouble]:
    """What `/ready` says."""
    document = seen.ready.document() or {}
    if document.get("status") == "stopping":
        yield Trouble(
            Severity.DOWN,
            "the application is stopping: it refuses new requests and lets open answers end",
            "wait for it to end, then start it anew",
        )
    for model in document.get("models_without_replica", ()):
        cause = _cause(model, mine) if mine is not None else ""
        where = f"see the logs in {mine.folder}" if mine is not None else "see the logs of its replicas"
        yield Trouble(
            Severity.DOWN,
            f"model {model} has no replica, so its requests are refused with 503"
            + (f"; the last error of an engine: {cause}" if cause else ""),
            f"wait while an engine starts; if none comes, {where}",
        )


def _cause(model: str, mine: Instance) -> str:
    """The last error of an engine of a model that runs on this machine."""
    try:
        models = load_settings(Path(mine.config)).models
    except ServeAppError:
        return ""  # the file is another one by now
    deployments = (
        f"{pool.name}-{each.name}" for each in models if model in each.names for pool in each.pools
    )
    causes = (engine_cause(deployment, Path(mine.folder)) for deployment in deployments)
    return next(filter(None, causes), "")


def refused(seen: Inspection) -> Iterator[Trouble]:
    """Whether we may look inside."""
    answer = seen.refusal
    if answer is None:
        return
    if answer.status in {401, 403}:
        yield Trouble(
            Severity.NOTE,
            f"the queues and replicas cannot be looked at: the application answered {answer.status}",
            "give a key with `admin` by --api-key or EWSJF_API_KEY, and ask again",
        )
    else:
        yield Trouble(
            Severity.DEGRADED,
            f"the application does not show its queues and replicas: it answered {answer.status}",
            "see the logs of its gateways",
        )


def clock(seen: Inspection) -> Iterator[Trouble]:
    """Whether its clock agrees with ours."""
    skew_s = seen.clock_skew_s
    if skew_s is not None and abs(skew_s) > _SKEW_S:
        side = "ahead of" if skew_s > 0 else "behind"
        yield Trouble(
            Severity.NOTE,
            f"its clock is {abs(skew_s):,.0f} s {side} this machine's, so times in logs do not agree",
            "let both machines follow a time server",
        )


def _held(url: str) -> str:
    parts = urlsplit(url)
    if parts.hostname not in _HERE:
        return ""
    return holder(parts.port or (443 if parts.scheme == "https" else 80))
