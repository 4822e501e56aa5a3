"""Reference of outcomes: the possible ends of a request, with their HTTP responses."""

import ast
import inspect
import json
from collections.abc import Iterator
from http import HTTPStatus
from pathlib import Path

from docs_reference.markdown import code, document, sentence, table
from docs_reference.source_text import field_comments
from serve_app import serving
from serve_app.errors import HTTP_STATUS, Outcome
from serve_app.serving.gateway.answer.responses import ANTHROPIC, NOT_ALLOWED_CODE, OPENAI, RequestRejected

_INTRODUCTION = """
# Outcomes and HTTP statuses

Every request has exactly one outcome. It is a label of metrics and a field of the gateway's log line, and it
determines the HTTP status.

Errors have OpenAI's format: `error.message` is the reason, `error.type` and `error.code` are listed below.
After a stream has begun, its status is 200, and an error is the last event of the stream.

The endpoints of Anthropic's API use its format: `error.type` is in the last column, and there is no
`error.code`. A full queue is 529 there, because 429 means the client's own limits.
"""

# No standard status means that the client has gone; this one is nginx's, and only logs and metrics show it.
# Python 3.13 has a newer phrase for 413.
_PHRASES = {413: "Content Too Large", 499: "Client Closed Request"}


def outcomes_page() -> str:
    """Return the whole page."""
    heads = ("Outcome", "HTTP status", "`error.type`", "`error.code`", "Anthropic's")
    rows = sorted({*_special_codes(), (code(NOT_ALLOWED_CODE), "403", code(Outcome.REJECTED_UNAUTHORISED))})
    special = table(("`error.code`", "HTTP status", "Outcome"), rows)
    return document(_INTRODUCTION, *_phases(heads), "## Codes for one reason", _SPECIAL, special)


_SPECIAL = "Some rejections have a code of their own, which replaces that of their outcome."


def _special_codes() -> Iterator[tuple[str, str, str]]:
    """Yield the rejections of the gateway that override the code of their outcome."""
    for path in (Path(inspect.getfile(serving)).parent / "gateway").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            given = {each.arg: each.value for each in node.keywords} if isinstance(node, ast.Call) else {}
            named = given.get("code")
            if isinstance(node, ast.Call) and node.args and isinstance(named, ast.Constant):
                outcome = Outcome[getattr(node.args[0], "attr", "")]
                numbers = ast.walk(given["status"]) if "status" in given else ()
                stated = sorted(str(each.value) for each in numbers if isinstance(each, ast.Constant))
                statuses = ", ".join(stated or [str(HTTP_STATUS[outcome])])
                yield code(str(named.value)), statuses, code(outcome)


def _phases(heads: tuple[str, ...]) -> list[str]:
    """Yield a table per phase of a request, named by the comments of the enumeration."""
    starts = field_comments(Outcome)
    parts: list[str] = []
    rows: list[tuple[str, ...]] = []
    for outcome in Outcome:
        if outcome.name in starts:
            rows = []
            parts += [f"## {sentence(starts[outcome.name]).rstrip('.')}", ""]
        rows.append(_row(outcome))
        parts[-1] = table(heads, rows)
    return parts


def _row(outcome: Outcome) -> tuple[str, ...]:
    status = HTTP_STATUS[outcome]
    phrase = _PHRASES.get(status) or HTTPStatus(status).phrase
    if outcome is Outcome.COMPLETED:
        return code(outcome), f"{status} {phrase}", "", "", ""
    rejection = RequestRejected(outcome, "")
    error = json.loads(OPENAI.error(rejection))["error"]
    given = (error["type"], error["code"])
    anthropic = json.loads(ANTHROPIC.error(rejection))["error"]["type"]
    return (
        code(outcome),
        f"{status} {phrase}",
        *(code(value) if value else "null" for value in given),
        f"{ANTHROPIC.status(rejection)} {code(anthropic)}",
    )
