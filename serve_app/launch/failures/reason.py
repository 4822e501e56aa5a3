"""The reason why a deployment did not start, in the words of whatever failed."""

import re
from pathlib import Path

from serve_app.launch.failures.engine_logs import error_lines

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
