"""The reason why a deployment did not start, in the words of whatever failed."""

import re
from pathlib import Path

# `serve_app.errors.EngineError: text`, at the beginning of a line of a traceback.
_ERROR = re.compile(r"^(?:ray\.exceptions\.\w+: )?(?:[\w.]*\.)?(\w*(?:Error|Exception|Interrupt)): (.*)$")
# vLLM prefixes the lines of its processes, and marks what went wrong.
_ENGINE_LOG = re.compile(
    r"^\((?:EngineCore|Worker|APIServer|VllmWorker)[^)]*\).*?(?:ERROR|CRITICAL)[^\]]*\] (.*)$"
)
_LONGEST = 1_200
# A replica's log may be long; its end tells.
_TAIL_BYTES = 200_000


def reason_of(deployment: str, message: str, folder: Path) -> str:
    """One paragraph: which deployment, and why.

    Args:
        message: what Serve says of the deployment, with the traceback of its constructor.
        folder: of the instance, where the logs of engines are.
    """
    own = _last_error(message.splitlines()) or message.strip().rsplit("\n", 1)[-1]
    reason = f"{deployment} did not start: {own}"
    if cause := engine_cause(folder):
        reason += f" Its engine says: {cause}"
    return reason[:_LONGEST]


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


def engine_cause(folder: Path) -> str:
    """The last error that a process of vLLM has logged; its log lines go to the files of Ray's workers."""
    logs = sorted(
        (
            *folder.glob("ray/session_latest/logs/worker-*.out"),
            *folder.glob("ray/session_latest/logs/worker-*.err"),
        ),
        key=lambda log: log.stat().st_mtime,
    )
    for log in reversed(logs):
        with log.open("rb") as file:
            file.seek(max(0, log.stat().st_size - _TAIL_BYTES))
            lines = file.read().decode("utf-8", "replace").splitlines()
        told = [found[1] for line in lines if (found := _ENGINE_LOG.match(line))]
        if cause := _last_error(told):
            return cause
    return ""
