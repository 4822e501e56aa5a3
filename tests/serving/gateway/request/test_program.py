"""Ids of sessions and programs, as the scheduler receives them, for each source of an id."""

import json
from typing import Any

import pytest

from serve_app.request import ProgramHint
from tests.serving.gateway.builders import MODEL, chat
from tests.serving.gateway.conftest import GatewayHarness

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
RESPONSES = "/v1/responses"
MESSAGES = "/v1/messages"
BODIES: dict[str, dict[str, Any]] = {
    CHAT: chat(),
    COMPLETIONS: {"model": MODEL, "prompt": "hello"},
    RESPONSES: {"model": MODEL, "input": "hello"},
    MESSAGES: {**chat(), "max_tokens": 4},
    "/v1/embeddings": {"model": MODEL, "input": "hello"},
}
USER = "user_0a1b2c_account_6f0e-11_session_7c1d-22"
GEN_AI = "gen_ai.conversation.id"


async def hint(
    harness: GatewayHarness, path: str = CHAT, headers: dict[str, Any] | None = None, **fields: Any
) -> ProgramHint | None:
    """Send a request, and return the program in its submission."""
    body = json.dumps({**BODIES[path], **fields})
    answer = await harness.http.post(path, content=body, headers=headers)
    assert answer.status_code == 200, answer.text
    return harness.dispatcher.submissions[-1].program


async def test_a_request_without_an_id_states_no_program(harness: GatewayHarness) -> None:
    for path in BODIES:
        assert await hint(harness, path) is None, path


async def test_a_header_states_the_session(harness: GatewayHarness) -> None:
    for name in (
        "x-session-id",
        "x-session-affinity",
        "x-dynamo-session-id",
        "x-claude-code-session-id",
        "x-litellm-session-id",
        "thread-id",
        "session-id",
    ):
        assert await hint(harness, headers={name: "s 1"}) == ProgramHint(session="s 1"), name
        assert name.encode() not in harness.engine.heads[-1]
    assert await hint(harness, headers={"x-session-id": "é".encode()}) == ProgramHint(session="é")


async def test_a_correlation_id_is_the_session_if_nothing_else_states_one(harness: GatewayHarness) -> None:
    headers: dict[str, Any] = {"x-correlation-id": "c", "x-program-id": "p"}
    assert await hint(harness, headers=headers) == ProgramHint(session="c", program="p")
    assert await hint(harness, headers=headers, session_id="s") == ProgramHint(session="s", program="p")


async def test_the_extensions_of_dynamos_clients_state_session_program_and_parent(
    harness: GatewayHarness,
) -> None:
    agent = {"session_id": "run", "trajectory_id": "run:search", "parent_trajectory_id": "run:plan"}
    control = {"session_control": {"session_id": "s", "action": "bind", "timeout": 300}}
    for nvext, expected in (
        (control, ProgramHint(session="s")),
        ({"agent_context": agent}, ProgramHint(session="run:search", program="run", parent="run:plan")),
        ({"agent_context": {"session_id": "run"}}, ProgramHint(session="run", program="run")),
        ({"agent_context": "none", "session_control": {"session_id": 7}}, None),
        ("none", None),
    ):
        assert await hint(harness, nvext=nvext) == expected, nvext
        assert json.loads(harness.engine.bodies[-1])["nvext"] == nvext
    assert await hint(harness, nvext=control, session_id="own") == ProgramHint(session="own")


async def test_headers_state_the_program_and_the_parent(harness: GatewayHarness) -> None:
    for name in ("x-parent-session-id", "x-dynamo-parent-session-id", "x-codex-parent-thread-id"):
        headers: dict[str, Any] = {"x-session-id": "s", "x-program-id": "p", name: "above"}
        expected = ProgramHint(session="s", program="p", parent="above")
        assert await hint(harness, headers=headers) == expected, name
        assert await hint(harness, headers={name: "above"}) is None, name


async def test_a_program_alone_is_also_the_session(harness: GatewayHarness) -> None:
    assert await hint(harness, headers={"x-program-id": "p"}) == ProgramHint(session="p", program="p")


async def test_a_body_states_the_session(harness: GatewayHarness) -> None:
    stated: list[tuple[str, dict[str, Any], str]] = [
        *((path, {"session_id": "s"}, "s") for path in (CHAT, COMPLETIONS, RESPONSES)),
        *((path, {"prompt_cache_key": "k"}, "k") for path in (CHAT, COMPLETIONS, RESPONSES)),
        (CHAT, {"metadata": {GEN_AI: "c", "id": "other"}}, "c"),
        (RESPONSES, {"conversation": "conv_1"}, "conv_1"),
        (RESPONSES, {"conversation": {"id": "conv_1"}}, "conv_1"),
        (MESSAGES, {"metadata": {"user_id": USER}}, "7c1d-22"),
        (MESSAGES, {"metadata": {"user_id": "user_0a_account__session_1_session_2"}}, "2"),
        (MESSAGES, {"metadata": {"user_id": '{"device_id": "d", "session_id": "s"}'}}, "s"),
    ]
    for path, fields, session in stated:
        assert await hint(harness, path, **fields) == ProgramHint(session=session), (path, fields)


async def test_the_first_source_counts(harness: GatewayHarness) -> None:
    headers: dict[str, Any] = {"x-dynamo-session-id": "3", "x-session-affinity": "2"}
    fields: dict[str, Any] = {"metadata": {GEN_AI: "6"}, "prompt_cache_key": "5", "session_id": "4"}
    for first in ("2", "3"):
        found = await hint(harness, headers=headers, **fields)
        assert found == ProgramHint(session=first)
        headers = {"x-dynamo-session-id": "3"}
    for first in ("4", "5", "6", "7"):
        found = await hint(harness, headers={"x-program-id": "7"}, **fields)
        assert found == ProgramHint(session=first, program="7")
        if fields:
            fields.popitem()


@pytest.mark.parametrize("value", ["", "x" * 257, "a\tb", b"a\x85b"])
async def test_unusable_ids_in_headers_are_ignored(harness: GatewayHarness, value: str | bytes) -> None:
    headers: dict[str, Any] = {"x-session-id": value, "x-parent-session-id": value}
    assert await hint(harness, headers=headers) is None
    assert await hint(harness, headers={**headers, "x-session-affinity": "s"}) == ProgramHint(session="s")


@pytest.mark.parametrize("value", ["", "x" * 257, "a\n", 5, None, True, ["s"], {"session_id": "s"}])
async def test_unusable_ids_in_bodies_are_ignored(harness: GatewayHarness, value: object) -> None:
    fields: dict[str, Any] = {"session_id": value, "prompt_cache_key": value, "metadata": {GEN_AI: value}}
    for path in (CHAT, COMPLETIONS, RESPONSES):
        assert await hint(harness, path, **fields) is None
        assert await hint(harness, path, metadata=value) is None
    assert await hint(harness, RESPONSES, conversation={"id": value}) is None
    assert await hint(harness, **{**fields, "prompt_cache_key": "k"}) == ProgramHint(session="k")


async def test_a_user_id_without_a_session_is_no_hint(harness: GatewayHarness) -> None:
    users = (
        "maria",
        "team_session_5",
        "user_1_session_",
        "{",
        '{"session_id": 5}',
        '{"user": "maria"}',
        "{}",
    )
    for user in users:
        assert await hint(harness, MESSAGES, metadata={"user_id": user}) is None, user
