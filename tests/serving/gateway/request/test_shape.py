"""Measured text: everything that the model reads, but not the bytes of media."""

import json
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from serve_app.request import PromptShape, TextCategory
from serve_app.serving.gateway.request.endpoints import SCHEDULED

CHAT, RESPONSES, COMPLETIONS = "/v1/chat/completions", "/v1/responses", "/v1/completions"
URL = "https://example.org/cat.png"


def data_uri(size: int) -> str:
    return "data:image/png;base64," + "iVBORw0K" * (size // 8)


def shape(path: str, **fields: Any) -> PromptShape:
    return SCHEDULED[path].parse(json.dumps({"model": "m", **fields}).encode()).spec.shape


def chat(*parts: Any) -> PromptShape:
    return shape(CHAT, messages=[{"role": "user", "content": list(parts)}])


# Encodings of an image, a sound, a video and a file.
MEDIA: dict[str, Callable[[str], dict[str, Any]]] = {
    "image": lambda data: {"type": "image_url", "image_url": {"url": data, "detail": "high"}},
    "image as text": lambda data: {"type": "image_url", "image_url": data},
    "input image": lambda data: {"type": "input_image", "image_url": data},
    "sound": lambda data: {"type": "input_audio", "input_audio": {"data": data, "format": "wav"}},
    "sound by address": lambda data: {"type": "audio_url", "audio_url": {"url": data}},
    "video": lambda data: {"type": "video_url", "video_url": {"url": data}},
    "file": lambda data: {"type": "file", "file": {"file_data": data, "filename": "a.pdf"}},
}


@pytest.mark.parametrize("media", MEDIA)
@pytest.mark.parametrize("data", [URL, data_uri(8), data_uri(2_000_000)], ids=["url", "small", "large"])
def test_the_bytes_of_media_are_no_text_in_a_chat(media: str, data: str) -> None:
    found = chat({"type": "text", "text": "What is this?"}, MEDIA[media](data))
    assert found == chat({"type": "text", "text": "What is this?"}, MEDIA[media](URL))
    assert (found.text_bytes, found.media_items, found.tool_bytes) == (13, 1, 0)
    assert found.category is TextCategory.PROSE


@pytest.mark.parametrize("field", ["image_url", "file_data", "file_url"])
@pytest.mark.parametrize("data", [URL, data_uri(2_000_000)], ids=["url", "large"])
def test_the_bytes_of_media_are_no_text_in_a_response(field: str, data: str) -> None:
    parts = [{"type": "input_text", "text": "What is this?"}, {"type": "input_file", field: data}]
    found = shape(RESPONSES, input=[{"role": "user", "content": parts}])
    assert (found.text_bytes, found.media_items, found.tool_bytes) == (13, 1, 0)


def test_an_image_that_a_tool_returns_is_no_text() -> None:
    screen = {"type": "input_image", "image_url": data_uri(400_000)}
    call = {"type": "function_call_output", "call_id": "1", "output": [screen]}
    found = shape(RESPONSES, input=[{"role": "user", "content": "Look."}, call])
    assert (found.text_bytes, found.media_items) == (5, 1)


def test_encoded_bytes_inside_a_text_are_text_since_the_model_reads_them() -> None:
    pasted = "Decode this: " + data_uri(4_000)
    assert chat({"type": "text", "text": pasted}).text_bytes == len(pasted)
    assert chat({"type": "text", "text": pasted}).media_items == 0
    assert shape(COMPLETIONS, prompt=pasted).text_bytes == len(pasted)


@given(st.lists(st.sampled_from([*MEDIA, "text"]), max_size=12), st.sampled_from([URL, data_uri(3_000)]))
def test_text_and_media_are_counted_apart_in_any_order(kinds: list[str], data: str) -> None:
    parts = [{"type": "text", "text": "abc"} if kind == "text" else MEDIA[kind](data) for kind in kinds]
    found = chat(*parts)
    texts = kinds.count("text")
    assert (found.text_bytes, found.media_items) == (3 * texts, len(kinds) - texts)


def test_tools_count_with_their_json_and_do_not_sway_the_category() -> None:
    tool = {"type": "function", "function": {"name": "f", "description": "数" * 300, "parameters": {}}}
    found = shape(CHAT, messages=[{"role": "user", "content": "Call it, please."}], tools=[tool] * 3)
    assert found.tool_bytes == len(json.dumps([tool] * 3))
    assert found.category is TextCategory.PROSE


TEXT = "word " * 20_000


def assistant_message(**message: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": "abc"}, {"role": "assistant", **message}]}


# Fields in which a chat template or its engine may find text.
PLACES: dict[str, tuple[str, dict[str, Any]]] = {
    "reasoning": (CHAT, assistant_message(content="x", reasoning=TEXT)),
    "reasoning_content": (CHAT, assistant_message(content="x", reasoning_content=TEXT)),
    "reasoning details": (CHAT, assistant_message(content="x", reasoning_details=[{"text": TEXT}])),
    "role": (CHAT, {"messages": [{"role": TEXT, "content": "x"}]}),
    "tool_call_id": (CHAT, assistant_message(content="x", tool_call_id=TEXT)),
    "name": (CHAT, assistant_message(content="x", name=TEXT)),
    "an unknown field of a message": (CHAT, assistant_message(content="x", whatever={"deep": [TEXT]})),
    "the name of an unknown field": (CHAT, assistant_message(content="x", **{TEXT: 1})),
    "a rejection beside a text": (
        CHAT,
        assistant_message(content=[{"type": "refusal", "text": "x", "refusal": TEXT}]),
    ),
    "documents": (CHAT, {**assistant_message(content="x"), "documents": [{"title": "t", "text": TEXT}]}),
    "chat_template": (CHAT, {**assistant_message(content="x"), "chat_template": TEXT}),
    "chat_template_kwargs": (
        CHAT,
        {**assistant_message(content="x"), "chat_template_kwargs": {"context": TEXT}},
    ),
    "an unknown field": (CHAT, {**assistant_message(content="x"), "whatever": TEXT}),
    "earlier input": (RESPONSES, {"input": "x", "previous_input_messages": [{"content": TEXT}]}),
    "the input of a custom tool": (RESPONSES, {"input": [{"type": "custom_tool_call", "input": TEXT}]}),
    "chat_template_kwargs of an embedding": (
        "/v1/embeddings",
        {**assistant_message(content="x"), "chat_template_kwargs": {"context": TEXT}},
    ),
}


@pytest.mark.parametrize("place", PLACES)
def test_no_text_that_a_model_may_read_is_left_out(place: str) -> None:
    path, fields = PLACES[place]
    found = shape(path, **fields)
    assert len(TEXT) <= found.text_bytes + found.tool_bytes < len(TEXT) + 200


BULKY = {
    "an image": [{"type": "image_url", "image_url": {"url": data_uri(2_000_000)}}],
    "a sound": [{"type": "input_audio", "input_audio": {"data": "A" * 2_000_000, "format": "wav"}}],
    "characters that JSON escapes": "\u6570\u00e9\U0001f600" * 30_000,
}


@pytest.mark.parametrize("bulk", BULKY)
def test_bulky_content_hides_no_text(bulk: str) -> None:
    bulky = {"role": "user", "content": BULKY[bulk]}
    alone = shape(CHAT, messages=[bulky])
    found = shape(CHAT, messages=[bulky, {"role": "user", "content": "x", "whatever": TEXT}])
    assert alone.tool_bytes == 0
    assert len(TEXT) <= found.tool_bytes < len(TEXT) + 200
    block = {"type": "image", "source": {"type": "base64", "data": data_uri(2_000_000)}}
    found = shape(
        "/v1/messages", max_tokens=1, whatever=TEXT, messages=[{"role": "user", "content": [block]}]
    )
    assert len(TEXT) <= found.tool_bytes < len(TEXT) + 200


@pytest.mark.parametrize(
    "inert",
    [
        {"metadata": {"note": TEXT}},
        {"logit_bias": {str(number): 1 for number in range(10_000)}},
        {"structured_outputs": {"json": {"description": TEXT}}},
        {"stop": [TEXT[:50]] * 10, "temperature": 0.5, "seed": 12345, "user": "u" * 2_000},
    ],
)
def test_fields_that_no_model_reads_are_not_counted(inert: dict[str, Any]) -> None:
    found = shape(CHAT, messages=[{"role": "user", "content": "abc"}], **inert)
    assert (found.text_bytes, found.tool_bytes) == (3, 0)


@pytest.mark.parametrize("name", ["kv_transfer_params", "vllm_xargs", "mm_processor_kwargs", "prediction"])
@pytest.mark.parametrize("size", [200, 10_000])
def test_token_ids_in_a_field_of_a_chat_count(name: str, size: int) -> None:
    alone = shape(CHAT, messages=[{"role": "user", "content": "abc"}])
    found = shape(
        CHAT, messages=[{"role": "user", "content": "abc"}], **{name: {"prompt_token_ids": [7] * size}}
    )
    # A token for each id, by any tokenizer's ratio for JSON.
    assert found.tool_bytes - alone.tool_bytes >= (4 * size if size > 200 or name[0] == "k" else 0)


def test_token_ids_of_a_completion_count_beside_texts_and_in_other_fields() -> None:
    ids = [7] * 10_000
    assert shape(COMPLETIONS, prompt=["text", ids]).tool_bytes >= 40_000
    assert shape(COMPLETIONS, prompt=[1, "text" * 1_000]).text_bytes == 4_000
    exact = shape(COMPLETIONS, prompt=[1], kv_transfer_params={"prompt_token_ids": ids})
    assert exact.prompt_tokens is not None
    assert exact.prompt_tokens >= 10_000
    assert shape(COMPLETIONS, prompt="a", prompt_embeds="A" * 40_000_000).media_items > 10


def test_ids_of_pooling_and_a_second_input_of_an_embedding_count() -> None:
    assert shape("/pooling", input=[[7] * 10_000]).tool_bytes >= 40_000
    both = shape("/v1/embeddings", input="x" * 5_000, messages=[{"role": "user", "content": "abc"}])
    assert both.text_bytes + both.tool_bytes >= 5_003


def test_a_text_beside_an_image_hides_neither() -> None:
    found = chat({"type": "image_url", "text": "abc", "image_url": {"url": URL}})
    assert (found.text_bytes, found.media_items) == (3, 1)
