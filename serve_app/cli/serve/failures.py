"""Diagnosis of slow or failed starts: engine logs, the reason of a failure, and process deaths."""

import re
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from serve_app.errors import ServeAppError


class RayStartError(ServeAppError):
    """Ray's processes did not start on this machine. They may have been late, so a retry may succeed."""


# -- engine logs: the stage of a start, and errors -----------------------------------------------------------
#
# Ray redirects the output of each actor, and of its child processes, to two files that begin with the actor's
# name.


_TAIL_BYTES = 200_000
_HEAD_BYTES = 4_096
_READ_EVERY_S = 2.0
# vLLM prefixes the lines of its processes and marks errors.
_MARKED = re.compile(r"(?:ERROR|CRITICAL)[^\]]*\] (.*)$")
# Messages of vLLM that mark the stages of a start, in order.
_STAGES = (
    ("Initializing a V1 LLM engine", "reading the configuration"),
    ("Starting to load model", "loading weights"),
    ("Loading weights took", "preparing the KV cache"),
    ("init engine (profile", "starting the API"),
)


class Stages:
    """Start stages of engines, read from their logs at most every two seconds."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._found: dict[str, tuple[float, str]] = {}

    def of(self, deployment: str) -> str:
        """Return the stage of a deployment's newest engine; empty if unknown."""
        now = time.monotonic()
        known = self._found.get(deployment)
        if known is None or now - known[0] > _READ_EVERY_S:
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
    """Return the lines that the newest engine of a deployment logged as errors."""
    for text in _texts(folder, deployment):
        errors = [found[1] for line in text.splitlines() if (found := _MARKED.search(line))]
        if errors:
            return errors
    return []


def _texts(folder: Path, deployment: str) -> Iterator[str]:
    """Yield the ends of the deployment's log files, newest first."""
    logs = folder.glob("ray/session_latest/logs/worker-*.???")
    for log in sorted(logs, key=lambda each: each.stat().st_mtime, reverse=True):
        with log.open("rb") as file:
            head = file.read(_HEAD_BYTES)
            if f":{deployment}".encode() not in head:
                continue
            file.seek(max(0, log.stat().st_size - _TAIL_BYTES))
            yield file.read().decode("utf-8", "replace")


# -- reason of a failed start ------------------------------------------------------------------------------


# Matches `serve_app.errors.EngineError: text` at the beginning of a traceback line.
_ERROR = re.compile(r"^(?:ray\.exceptions\.\w+: )?(?:[\w.]*\.)?(\w*(?:Error|Exception|Interrupt)): (.*)$")
# vLLM's message if the cause is in the log of another process.
_SEE_ABOVE = "Engine core initialization failed"
_MAX_LENGTH = 1_200


def reason_of(deployment: str, message: str, folder: Path) -> str:
    """Return one paragraph with the deployment and the reason of its failure.

    Args:
        message: Serve's status message, with the traceback of the constructor.
        folder: folder of the instance, with the engines' logs.
    """
    own = _last_error(message.splitlines()) or message.strip().rsplit("\n", 1)[-1]
    reason = f"{deployment} did not start: {own}"
    if cause := engine_cause(deployment, folder):
        # Replace vLLM's reference to "above" by the cause, because nothing is above here.
        reason = f"{reason.split(_SEE_ABOVE, maxsplit=1)[0].rstrip(': ')}: {cause}"
    return reason[:_MAX_LENGTH]


def engine_cause(deployment: str, folder: Path) -> str:
    """Return the first error of a deployment's newest engine. Other processes fail as a consequence."""
    for line in error_lines(folder, deployment):
        if found := _ERROR.match(line.strip()):
            return f"{found[1]}: {found[2]}"
    return ""


def _last_error(lines: list[str]) -> str:
    """Return the last error of a traceback with its continuation lines."""
    for number in range(len(lines) - 1, -1, -1):
        found = _ERROR.match(lines[number].strip())
        if found is not None and found[1] not in {"RayTaskError", "RuntimeError", "ActorDiedError"}:
            rest = [line.strip() for line in lines[number + 1 :]]
            return " ".join([found[2], *rest]).strip()
    for line in reversed(lines):
        if found := _ERROR.match(line.strip()):
            return found[2]
    return ""


# -- process deaths during a start ---------------------------------------------------------------------------
#
# Serve replaces a process that dies, so a single death is not a failed start: the kernel may kill for memory,
# or a node may be lost. An engine that dies after every start is a failure.


# Ray's message for a process that exited or was killed, as opposed to an error in a constructor.
_DIED = re.compile(r"The actor died unexpectedly|its worker process has died")
# Serve's limit on failed constructors.
_MAX_DEATHS = 3


class StartDeaths:
    """Counter of how often each deployment has become unhealthy."""

    def __init__(self) -> None:
        self._deaths: Counter[str] = Counter()
        self._unhealthy: set[str] = set()

    def __repr__(self) -> str:
        return f"<StartDeaths {dict(self._deaths)}>"

    def record(self, deployment: str, *, unhealthy: bool) -> None:
        """Record a deployment's current health."""
        if unhealthy and deployment not in self._unhealthy:
            self._deaths[deployment] += 1
            self._unhealthy.add(deployment)
        elif not unhealthy:
            self._unhealthy.discard(deployment)

    def failure(self, deployment: str) -> str:
        """Return why the start cannot succeed; empty while it can."""
        deaths = self._deaths[deployment]
        return f"{deployment} has died {deaths} times" if deaths > _MAX_DEATHS else ""


def is_process_death(message: str) -> bool:
    """Return whether Serve's message reports a dead process, not an error that its code raised."""
    return _DIED.search(message) is not None
