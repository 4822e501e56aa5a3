"""The program of a request: ids by which clients state the conversation and the agents it belongs to.

Clients do not agree on a field, so the first usable id of the following list is the session:

1. `SESSION_HEADERS`, in their order.
2. In the body: `session_id`, `prompt_cache_key`, `metadata["gen_ai.conversation.id"]` and `conversation` of
   OpenAI's APIs, or the session in `metadata.user_id` of the Messages API. Clients of Dynamo send
   `nvext.session_control.session_id`, or `nvext.agent_context` with the ids of an agent's trajectory, of its
   run and of the trajectory that launched it.
3. `x-correlation-id`, which load generators keep for a conversation, but other clients renew.
4. The chain of `previous_response_id`, see `response_holders`.
5. `x-program-id`.

An id has 1 to 256 printable characters. Others are ignored, because a hint must not fail a request.
"""

import re
from collections.abc import Iterable, Mapping
from typing import Any

import msgspec

from serve_app.request import ProgramHint
from serve_app.serving.gateway.answer.responses import header_text
from serve_app.serving.gateway.request.fields import (
    ABSENT,
    BodyFields,
    GenerationFields,
    MessagesFields,
    ResponsesFields,
)

SESSION_HEADERS = (
    b"x-session-id",
    # opencode sends both.
    b"x-session-affinity",
    b"x-dynamo-session-id",
    b"x-claude-code-session-id",
    b"x-litellm-session-id",
    # Codex: the thread is one agent, the session may have several.
    b"thread-id",
    b"session-id",
)
PARENT_HEADERS = (b"x-parent-session-id", b"x-dynamo-parent-session-id", b"x-codex-parent-thread-id")
PROGRAM_HEADERS = (b"x-program-id",)
CORRELATION_HEADERS = (b"x-correlation-id",)
_HEADERS = frozenset((*SESSION_HEADERS, *PARENT_HEADERS, *PROGRAM_HEADERS, *CORRELATION_HEADERS))

_MAX_CHARACTERS = 256
# `user_<hash>_account_<uuid>_session_<uuid>`; newer versions of Claude Code write an object as text.
_USER_OF_CLAUDE_CODE = re.compile(r"user_.*_session_(.+)")


def program_hint(headers: Mapping[bytes, bytes], body: BodyFields) -> ProgramHint | None:
    """Return the program that a request states; None if it states none."""
    session = program = parent = correlation = ""
    if not _HEADERS.isdisjoint(headers):
        session, program = session_of(headers), _header_id(headers, PROGRAM_HEADERS)
        parent = _header_id(headers, PARENT_HEADERS)
        correlation = _header_id(headers, CORRELATION_HEADERS)
    session = session or _session_of_body(body)
    if isinstance(body, GenerationFields) and body.nvext is not ABSENT:
        of_dynamo = _dynamo_ids(body.nvext)
        session, program, parent = session or of_dynamo[0], program or of_dynamo[1], parent or of_dynamo[2]
    session = session or correlation or program
    return ProgramHint(session=session, program=program or None, parent=parent or None) if session else None


def session_of(headers: Mapping[bytes, bytes]) -> str:
    """Return the session that the headers of a request state; empty for none."""
    return _header_id(headers, SESSION_HEADERS)


def _session_of_body(body: BodyFields) -> str:
    if isinstance(body, MessagesFields):
        return _session_of_user(body.end_user or "")
    if not isinstance(body, GenerationFields):
        return ""
    stated = body.conversation if isinstance(body, ResponsesFields) else ABSENT
    if body.session_id is body.prompt_cache_key is body.metadata is stated is ABSENT:
        return ""
    conversation = _value(stated)
    return _first_id(
        (
            _value(body.session_id),
            _value(body.prompt_cache_key),
            _member(_value(body.metadata), "gen_ai.conversation.id"),
            conversation,
            _member(conversation, "id"),
        )
    )


def _dynamo_ids(nvext: msgspec.Raw) -> tuple[str, str, str]:
    """Return session, program and parent in the extension fields of Dynamo's clients; each may be empty.

    A trajectory is one conversation of an agent; the session of its context is the agent's whole run.
    """
    extensions = _value(nvext)
    agent, control = _member(extensions, "agent_context"), _member(extensions, "session_control")
    run, trajectory = _member(agent, "session_id"), _member(agent, "trajectory_id")
    session = _first_id((trajectory, _member(control, "session_id"), run))
    return session, _first_id([run]), _first_id([_member(agent, "parent_trajectory_id")])


def _session_of_user(user_id: str) -> str:
    """Return the session inside a user id of Claude Code; empty for an id that names only a user."""
    if user_id.startswith("{"):
        return _first_id([_member(_value(user_id), "session_id")])
    named = _USER_OF_CLAUDE_CODE.fullmatch(user_id)
    return _first_id([named[1]]) if named is not None else ""


def _value(field: msgspec.Raw | str) -> Any:
    """Decode a field of any type; None if it is absent or not JSON."""
    if field is ABSENT:
        return None
    try:
        return msgspec.json.decode(field)
    except (ValueError, RecursionError):
        return None


def _member(value: Any, name: str) -> Any:
    return value.get(name) if isinstance(value, dict) else None


def _header_id(headers: Mapping[bytes, bytes], names: Iterable[bytes]) -> str:
    return _first_id(header_text(headers[name]) for name in names if name in headers)


def _first_id(candidates: Iterable[Any]) -> str:
    """Return the first usable id; empty if there is none."""
    return next((each for each in candidates if _is_usable(each)), "")


def _is_usable(found: Any) -> bool:
    return isinstance(found, str) and 0 < len(found) <= _MAX_CHARACTERS and found.isprintable()
