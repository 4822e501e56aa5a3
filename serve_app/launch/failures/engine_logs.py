"""What engines have written: the log files of a deployment's replicas, the stage of a start, errors.

Ray writes the output of each actor, and of the processes that it starts, into two files of its own, which
begin with the actor's name.
"""

import re
import time
from collections.abc import Iterator
from pathlib import Path

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
