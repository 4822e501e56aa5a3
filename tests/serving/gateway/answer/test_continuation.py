"""Answers that one engine begins and another one continues."""

import json
from typing import Any

import msgspec
import pytest

from serve_app.serving.gateway.answer.assembly import ContinuableAssembly, NotContinuedError
from serve_app.serving.gateway.upstream import UpstreamError

PROMPT = [7, 8]


def begun(limit: int | None = 50, *, is_chat: bool = True) -> ContinuableAssembly:
    assembly = ContinuableAssembly(limit, is_chat=is_chat)
    assert fields(assembly) == {"return_token_ids": True}
    return assembly


def fields(assembly: ContinuableAssembly) -> dict[str, Any]:
    """Begin an attempt, and return its fields."""
    found = msgspec.json.decode(b"{" + b",".join(assembly.begin_attempt()) + b"}")
    assert isinstance(found, dict)
    return found


def feed(assembly: ContinuableAssembly, chunk: dict[str, Any]) -> None:
    common = {"id": "x", "object": "chat.completion.chunk", "created": 1, "model": "m"}
    assembly.feed(b"data: " + json.dumps({**common, **chunk}).encode() + b"\n\n")


def open_with(assembly: ContinuableAssembly, prompt: list[int] | None = PROMPT, id_: str = "x") -> None:
    """Feed the first chunk of a chat."""
    chunk = {"id": id_, "choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}}]}
    feed(assembly, chunk if prompt is None else {**chunk, "prompt_token_ids": prompt})


def tokens(assembly: ContinuableAssembly, *ids: int, end: str | None = None, **delta: Any) -> None:
    """Feed one chunk of a chat."""
    choice: dict[str, Any] = {"index": 0, "delta": delta, "finish_reason": end}
    feed(assembly, {"choices": [{**choice, "token_ids": list(ids)} if ids else choice]})


def usage(assembly: ContinuableAssembly, prompt: int, output: int, **details: Any) -> None:
    counts = {"prompt_tokens": prompt, "completion_tokens": output, "total_tokens": prompt + output}
    feed(assembly, {"choices": [], "usage": {**counts, **details}})


def test_an_answer_is_continued_after_its_last_word() -> None:
    assembly = begun()
    open_with(assembly, id_="first")
    tokens(assembly, 1, content="Hello")
    tokens(assembly, 2, content=" world")
    tokens(assembly, 3, content=" (")
    assert assembly.kept_tokens == 2
    assert fields(assembly) == {
        "return_token_ids": True,
        "kv_transfer_params": {"prompt_token_ids": [7, 8, 1, 2]},
        "max_completion_tokens": 48,
    }
    open_with(assembly, [7, 8, 1, 2], id_="second")
    tokens(assembly, 3, content=" (")
    tokens(assembly, 4, 5, content="bye)", end="stop")
    usage(
        assembly, 4, 3, prompt_tokens_details={"cached_tokens": 4}, completion_tokens_details={"reasoning": 1}
    )
    answer = json.loads(assembly.whole())
    assert answer == {
        "id": "first",
        "object": "chat.completion",
        "created": 1,
        "model": "m",
        "choices": [
            {
                "index": 0,
                "logprobs": None,
                "finish_reason": "stop",
                "stop_reason": None,
                "message": {"role": "assistant", "content": "Hello world (bye)", "refusal": None},
            }
        ],
        "usage": {
            "prompt_tokens": 2,
            "completion_tokens": 5,
            "total_tokens": 7,
            "prompt_tokens_details": {"cached_tokens": 2},
        },
    }


@pytest.mark.parametrize(
    "last",
    [
        # The first bytes of a character, which detokenizers hold back.
        [((2,), {"content": ""})],
        # A chunk of a parser that holds everything back.
        [((2,), {})],
        # Several tokens, of which the last may be held back.
        [((2, 3), {"content": " more"})],
        # A parser may hold back "<" after the space, and white space at the end of reasoning.
        [((2,), {"content": " "})],
        # Ids are missing: the texts after them do not belong to the ids.
        [((), {"content": " more"}), ((3,), {"content": " text"})],
        # The kinds are not separable.
        [((2,), {"content": " more", "reasoning": "more"})],
    ],
)
def test_only_chunks_that_hold_nothing_back_are_kept(last: list[tuple[tuple[int, ...], Any]]) -> None:
    assembly = begun()
    open_with(assembly)
    tokens(assembly, 1, content="Hello")
    for ids, delta in last:
        tokens(assembly, *ids, **delta)
    assert assembly.kept_tokens == 1
    fields(assembly)
    open_with(assembly, [7, 8, 1])
    tokens(assembly, 2, content=" end", end="stop")
    assert json.loads(assembly.whole())["choices"][0]["message"]["content"] == "Hello end"


def test_tokens_whose_text_was_held_back_are_kept_with_the_next_word() -> None:
    assembly = begun()
    open_with(assembly)
    tokens(assembly, 1, content="")
    tokens(assembly, 2, content="é")
    assert fields(assembly)["kv_transfer_params"] == {"prompt_token_ids": [7, 8, 1, 2]}


def test_reasoning_and_content_are_kept_apart() -> None:
    assembly = begun()
    open_with(assembly)
    tokens(assembly, 1, reasoning="so")
    tokens(assembly, 2)
    tokens(assembly, 3, content="yes")
    fields(assembly)
    open_with(assembly, [7, 8, 1, 2, 3])
    tokens(assembly, 4, content=" sir", end="stop")
    message = json.loads(assembly.whole())["choices"][0]["message"]
    assert message == {"role": "assistant", "reasoning": "so", "content": "yes sir", "refusal": None}


def test_an_output_token_always_remains() -> None:
    assembly = begun(2)
    open_with(assembly)
    tokens(assembly, 1, content="a")
    tokens(assembly, 2, content="b")
    assert assembly.kept_tokens == 1


def test_the_end_of_a_lost_answer_is_generated_again() -> None:
    assembly = begun()
    open_with(assembly)
    tokens(assembly, 1, content="a")
    tokens(assembly, 2, content="b", end="stop")
    assert assembly.is_complete
    fields(assembly)
    assert not assembly.is_complete
    open_with(assembly, [7, 8, 1])
    with pytest.raises(UpstreamError, match="before the answer was complete"):
        assembly.whole()


def test_a_cut_event_of_an_earlier_attempt_is_dropped() -> None:
    assembly = begun()
    open_with(assembly)
    tokens(assembly, 1, content="a")
    assembly.feed(b'data: {"choices": [{"ind')
    fields(assembly)
    open_with(assembly, [7, 8, 1])
    tokens(assembly, 2, content="b", end="stop")
    assert json.loads(assembly.whole())["choices"][0]["message"]["content"] == "ab"


@pytest.mark.parametrize("prompt", [None, [], PROMPT, [7, 8, 2]])
def test_an_engine_that_begins_anew_is_detected(prompt: list[int] | None) -> None:
    assembly = begun()
    open_with(assembly)
    tokens(assembly, 1, content="a")
    fields(assembly)
    with pytest.raises(NotContinuedError, match="ignored"):
        open_with(assembly, prompt)


def test_a_parser_that_lost_its_state_is_detected() -> None:
    assembly = begun()
    open_with(assembly)
    tokens(assembly, 1, reasoning="so")
    fields(assembly)
    open_with(assembly, [7, 8, 1])
    with pytest.raises(NotContinuedError, match="continued reasoning as content"):
        tokens(assembly, 2, content=" what")


def test_nothing_is_kept_without_ids() -> None:
    assembly = begun()
    open_with(assembly, None)
    tokens(assembly, 1, content="a")
    assert assembly.kept_tokens == 0
