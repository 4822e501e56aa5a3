"""All troubles of one application, the worst first."""

from collections.abc import Callable, Iterator

from serve_app.diagnosis import history, load, reachability, replicas
from serve_app.diagnosis.inspection import Document, Inspection, SilentError, inspect
from serve_app.diagnosis.trouble import Severity, Trouble
from serve_app.launch.instance import Instance

Check = Callable[[Document], Iterator[Trouble]]

_OF_STATUS: tuple[Check, ...] = (
    replicas.pools,
    replicas.reports,
    load.saturation,
    replicas.tuner,
    replicas.decision_log,
)
_OF_QUEUES: tuple[Check, ...] = (load.queue_length, load.longest_wait)


def diagnose(url: str, api_key: str | None, running: list[Instance]) -> list[Trouble]:
    """What is wrong with the application at an address.

    Args:
        api_key: with `admin`, where the application has keys.
        running: the applications that run on this machine.
    """
    try:
        seen = inspect(url, api_key)
    except SilentError as error:
        return [reachability.why_silent(url, str(error), running)]
    if not reachability.is_ours(seen):
        return [reachability.why_foreign(url, seen, running)]
    mine = next((each for each in running if each.url == url), None)
    return sorted(_inside(seen, mine), key=lambda trouble: trouble.severity)


def _inside(seen: Inspection, mine: Instance | None) -> Iterator[Trouble]:
    yield from reachability.unready(seen, mine)
    yield from reachability.refused(seen)
    try:
        for model in seen.status:
            yield from replicas.scheduler(model)
            if "error" not in model:
                yield from (trouble for check in _OF_STATUS for trouble in check(model))
        for queue in seen.queues:
            if "error" not in queue:
                yield from (trouble for check in _OF_QUEUES for trouble in check(queue))
    except (KeyError, TypeError, AttributeError) as error:
        yield Trouble(
            Severity.NOTE,
            f"the application speaks of itself in another way than this program expects ({error!r})",
            "ask with the program of the release that it runs",
        )
    for name in _models(seen):
        for look in (history.outcomes, history.put_backs, history.errors):
            yield from look(seen, name)
    yield from reachability.clock(seen)


def _models(seen: Inspection) -> list[str]:
    """Every model with metrics; those are read without a key."""
    named = (sample.labels.get("model") for sample in seen.samples)
    return sorted({name for name in named if name})
