"""A start that fails or takes long: the logs of its engines, the reason, and deaths of processes."""

import re
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

# What engines have written: the log files of a deployment's replicas, the stage of a start, errors.
#
# Ray writes the output of each actor, and of the processes that it starts, into two files of its own, which
# begin with the actor's name.


_TAIL_BYTES = 200_000
_HEAD_BYTES = 4_096
_LOOK_EVERY_S = 2.0
# vLLM prefixes the lines of its processes, and marks what went wrong.
_MARKED = re.compile(r"(?:ERROR|CRITICAL)[^\]]*\] (.*)$")
# vLLM's own words for how far it is, in their order.
_STAGES = (
    ("Initializing a V1 LLM engine", "reading its configuration"),
    ("Starting to load model", "loading weights"),
    ("Loading weights took", "preparing the KV cache"),
    ("init engine (profile", "opening its API"),
)


class Stages:
    """How far engines are; looks into their logs no more often than a person would."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._found: dict[str, tuple[float, str]] = {}

    def of(self, deployment: str) -> str:
        """The stage of a deployment's newest engine, empty when nothing tells."""
        now = time.monotonic()
        known = self._found.get(deployment)
        if known is None or now - known[0] > _LOOK_EVERY_S:
            known = self._found[deployment] = (now, _stage(self._folder, deployment))
        return known[1]


def _stage(folder: Path, deployment: str) -> str:
    for text in _texts(folder, deployment):
        places = {text.rfind(words): name for words, name in _STAGES}
        last = max(places)
        if last >= 0:
            return places[last]
    return ""


def error_lines(folder: Path, deployment: str) -> list[str]:
    """What the newest engine of a deployment has logged as errors."""
    for text in _texts(folder, deployment):
        told = [found[1] for line in text.splitlines() if (found := _MARKED.search(line))]
        if told:
            return told
    return []


def _texts(folder: Path, deployment: str) -> Iterator[str]:
    """The ends of the deployment's log files, the newest first."""
    logs = folder.glob("ray/session_latest/logs/worker-*.???")
    for log in sorted(logs, key=lambda each: each.stat().st_mtime, reverse=True):
        with log.open("rb") as file:
            head = file.read(_HEAD_BYTES)
            if f":{deployment}".encode() not in head:
                continue
            file.seek(max(0, log.stat().st_size - _TAIL_BYTES))
            yield file.read().decode("utf-8", "replace")


# The reason why a deployment did not start, in the words of whatever failed.


# `serve_app.errors.EngineError: text`, at the beginning of a line of a traceback.
_ERROR = re.compile(r"^(?:ray\.exceptions\.\w+: )?(?:[\w.]*\.)?(\w*(?:Error|Exception|Interrupt)): (.*)$")
# vLLM's words when the cause is in the log of another process.
_SEE_ABOVE = "Engine core initialization failed"
_LONGEST = 1_200


def reason_of(deployment: str, message: str, folder: Path) -> str:
    """One paragraph: which deployment, and why.

    Args:
        message: what Serve says of the deployment, with the traceback of its constructor.
        folder: of the instance, where the logs of engines are.
    """
    own = _last_error(message.splitlines()) or message.strip().rsplit("\n", 1)[-1]
    reason = f"{deployment} did not start: {own}"
    if cause := engine_cause(deployment, folder):
        # The engine's own words in place of "see above", as nothing is above here.
        reason = f"{reason.split(_SEE_ABOVE, maxsplit=1)[0].rstrip(': ')}: {cause}"
    return reason[:_LONGEST]


def engine_cause(deployment: str, folder: Path) -> str:
    """What the first process of a deployment's newest engine failed with; others fail because of it."""
    for line in error_lines(folder, deployment):
        if found := _ERROR.match(line.strip()):
            return f"{found[1]}: {found[2]}"
    return ""


def _last_error(lines: list[str]) -> str:
    """The last error of a traceback, with the lines that continue it."""
    for number in range(len(lines) - 1, -1, -1):
        found = _ERROR.match(lines[number].strip())
        if found is not None and found[1] not in {"RayTaskError", "RuntimeError", "ActorDiedError"}:
            rest = [line.strip() for line in lines[number + 1 :]]
            return " ".join([found[2], *rest]).strip()
    for line in reversed(lines):
        if found := _ERROR.match(line.strip()):
            return found[2]
    return ""


# Processes that die while an application starts.
#
# Serve replaces a process that dies, as it does later, so one death is no failed start: the kernel kills for
# memory, and a node is lost. An engine that dies whenever it has started is another thing.


# What Ray says of a process that ended by itself or was killed; an error of a constructor is told otherwise.
_DIED = re.compile(r"The actor died unexpectedly|its worker process has died")
# As many as Serve allows a constructor to fail.
_MOST_DEATHS = 3


class DeathsInStart:
    """Counts how often each deployment has become unhealthy."""

    def __init__(self) -> None:
        self._deaths: Counter[str] = Counter()
        self._unhealthy: set[str] = set()

    def __repr__(self) -> str:
        return f"<DeathsInStart {dict(self._deaths)}>"

    def note(self, deployment: str, *, unhealthy: bool) -> None:
        """Take what Serve says now."""
        if unhealthy and deployment not in self._unhealthy:
            self._deaths[deployment] += 1
            self._unhealthy.add(deployment)
        elif not unhealthy:
            self._unhealthy.discard(deployment)

    def are_too_many(self, deployment: str) -> str:
        """Why a start cannot succeed; empty while it can."""
        deaths = self._deaths[deployment]
        return f"{deployment} has died {deaths} times" if deaths > _MOST_DEATHS else ""


def is_death(message: str) -> bool:
    """Whether Serve's message of a failed start tells of a process that died, and not of its own error."""
    return _DIED.search(message) is not None
