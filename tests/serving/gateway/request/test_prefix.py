import json
from collections.abc import Sequence
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from serve_app.serving.gateway.request.fields import ChatFields, CompletionFields, ResponsesFields
from serve_app.serving.gateway.request.measure import (
    chat_prompt,
    completion_prompt,
    engine_salt,
    responses_prompt,
)

SYSTEM = {"role": "system", "content": "You answer in rhymes. " * 60}  # 1,320 bytes
QUESTION = {"role": "user", "content": "Why is the sky blue? " * 40}
ANSWER = {"role": "assistant", "content": "It is because of you. " * 40}


def chat(*messages: dict[str, Any], tenant: str = "", model: str = "m", **fields: Any) -> tuple[int, ...]:
    body = {"model": model, "messages": messages, **fields}
    read = msgspec.json.decode(json.dumps(body).encode(), type=ChatFields)
    return chat_prompt(read).prefix_hashes(model=model, tenant=tenant)


def completion(prompt: object, **fields: Any) -> tuple[int, ...]:
    read = msgspec.json.decode(
        json.dumps({"model": "m", "prompt": prompt, **fields}).encode(), type=CompletionFields
    )
    return completion_prompt(read).prefix_hashes(model="m")


def responses(input_: object, **fields: Any) -> tuple[int, ...]:
    read = msgspec.json.decode(
        json.dumps({"model": "m", "input": input_, **fields}).encode(), type=ResponsesFields
    )
    return responses_prompt(read).prefix_hashes(model="m")


def common(one: Sequence[int], other: Sequence[int]) -> int:
    return next(
        (place for place, (left, right) in enumerate(zip(one, other, strict=False)) if left != right),
        min(len(one), len(other)),
    )


def test_the_next_turn_of_a_chat_begins_as_the_turn_before_it() -> None:
    first, second = chat(SYSTEM, QUESTION), chat(SYSTEM, QUESTION, ANSWER, QUESTION)
    assert len(first) == (1_320 + 840) // 512
    assert second[: len(first)] == first
    assert len(second) > len(first)


def test_a_text_in_parts_is_the_same_text() -> None:
    parts = [
        {"type": "text", "text": QUESTION["content"][:400]},
        {"type": "text", "text": QUESTION["content"][400:]},
    ]
    assert chat({"role": "user", "content": parts}) == chat(QUESTION)


def test_tools_stand_first_because_templates_put_them_there() -> None:
    tools = [{"type": "function", "function": {"name": "f", "description": "d" * 600}}]
    assert common(chat(SYSTEM, tools=tools), chat(SYSTEM)) == 0
    assert common(chat(SYSTEM, tools=tools), chat(QUESTION, tools=tools)) == 1
    assert chat(SYSTEM, tools=None) == chat(SYSTEM)


def test_nothing_after_an_image_is_compared_because_images_are_not_hashed() -> None:
    image = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
    pictured = {"role": "user", "content": [{"type": "text", "text": "t" * 600}, image]}
    assert chat(SYSTEM, pictured, ANSWER, QUESTION) == chat(SYSTEM, pictured)
    assert len(chat(SYSTEM, pictured)) == (1_320 + 600) // 512


def test_a_prompt_of_less_than_a_block_has_no_prefix() -> None:
    assert chat({"role": "user", "content": "Hello!"}) == ()
    assert completion("x" * 511) == ()
    assert len(completion("x" * 512)) == 1


def test_token_ids_are_cut_by_their_number() -> None:
    ids = list(range(400))
    assert len(completion(ids)) == 3
    assert completion([ids]) == completion(ids)
    assert common(completion(ids), completion([*ids[:300], 7])) == 2


def test_several_prompts_in_one_request_have_no_common_beginning() -> None:
    assert completion(["x" * 600, "x" * 600]) == ()
    assert completion([list(range(400)), list(range(400))]) == ()
    assert completion(["x" * 600]) == completion("x" * 600)


@pytest.mark.parametrize("ids", [[2**63] * 200, [1] * 199 + ["x"]])
def test_invalid_token_ids_have_no_prefix(ids: list[object]) -> None:
    assert completion(ids) == ()


def test_prompts_that_a_model_reads_differently_do_not_match() -> None:
    text = "x" * 600
    hashes = {
        completion(text),
        chat({"role": "user", "content": text}),
        responses(text),
        chat({"role": "user", "content": text}, model="adapter"),
        chat({"role": "user", "content": text}, cache_salt="mine"),
        chat({"role": "user", "content": text}, tenant="a"),
        chat({"role": "user", "content": text}, tenant="b"),
    }
    assert len(hashes) == 7


def test_a_response_continues_where_another_has_ended() -> None:
    question = [{"role": "user", "content": "q" * 700}]
    went_on = [*question, {"type": "function_call", "arguments": "a" * 600, "name": "f", "call_id": "1"}]
    output = [*went_on, {"type": "function_call_output", "output": "o" * 600, "call_id": "1"}]
    lengths = [len(responses(input_, instructions="Be kind.")) for input_ in (question, went_on, output)]
    assert lengths == [1, 2, 3]
    assert (
        common(responses(question, instructions="Be kind."), responses(output, instructions="Be kind.")) == 1
    )
    assert common(responses(question), responses(question, instructions="Be kind.")) == 0


def test_all_gateways_compute_the_same_hashes() -> None:
    """A change here moves every session to another replica once, and conflicts with older gateways."""
    assert completion("x" * 512) == (EXPECTED,)


EXPECTED = 12_457_032_099_324_169_265


@given(st.text(max_size=3_000), st.text(max_size=3_000))
def test_prompts_match_as_far_as_whole_blocks_are_the_same(one: str, other: str) -> None:
    left, right = one.encode(), other.encode()
    same = common(left, right)
    assert common(completion(one), completion(other)) == same // 512
    assert all(0 <= block < 2**64 for block in completion(one))


def test_a_tenants_salt_for_engines_cannot_be_set_by_another() -> None:
    salts = {engine_salt("ab", ""), engine_salt("a", "b"), engine_salt("", "ab"), engine_salt("ab", "x")}
    assert len(salts) == 4
    assert engine_salt("other", engine_salt("ab", "")) not in salts
