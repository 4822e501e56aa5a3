"""Stop strings, logprobs and the ranges of sampling parameters."""

import json
import math
from typing import Any

import pytest

from tests.engines.servers import Served

ASK: list[Any] = [{"role": "user", "content": "Go on."}]


def events(text: str) -> list[Any]:
    lines = [line.removeprefix("data: ") for line in text.split("\n\n") if line]
    assert lines[-1] == "[DONE]"
    return [json.loads(line) for line in lines[:-1]]


# -- values of another type, which vLLM coerces --------------------------------------------------------------


@pytest.mark.parametrize("tokens", [3.0, "3", "3.0"])
async def test_a_number_may_be_written_as_another_type(engine: Served, tokens: Any) -> None:
    numbers = {"max_tokens": tokens, "temperature": "0.5", "ignore_eos": 1, "n": 2.0}
    answer = await engine.http.post("/v1/completions", json={"prompt": [7.0, 8.0], **numbers})
    assert answer.status_code == 200, answer.text
    assert len(answer.json()["choices"]) == 2
    assert answer.json()["usage"]["completion_tokens"] == 6


@pytest.mark.parametrize("tokens", [3.5, "three", [3], {}])
async def test_values_that_are_not_numbers_are_rejected(engine: Served, tokens: Any) -> None:
    answer = await engine.http.post("/v1/completions", json={"prompt": "x", "max_tokens": tokens})
    assert answer.status_code == 400


async def test_bytes_that_are_no_text_are_rejected_wherever_they_are(engine: Served) -> None:
    body = b'{"messages":[{"role":"user","content":"x"}],"tools":[{"fun\xe6ction":1}]}'
    headers = {"content-type": "application/json"}
    answer = await engine.http.post("/v1/chat/completions", content=body, headers=headers)
    assert answer.status_code == 400


# -- stop strings -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("include", [False, True])
async def test_a_stop_string_ends_the_answer(engine: Served, stream: bool, include: bool) -> None:
    body = {
        "prompt": "x",
        "max_tokens": 200,
        "ignore_eos": True,
        "stop": ["nowhere to be found", "of tok"],
        "include_stop_str_in_output": include,
        "stream": stream,
        "stream_options": {"include_usage": True} if stream else None,
    }
    answer = await engine.http.post("/v1/completions", json=body)
    if stream:
        *chunks, last = events(answer.text)
        text = "".join(chunk["choices"][0]["text"] for chunk in chunks)
        choice, usage = chunks[-1]["choices"][0], last["usage"]
    else:
        (choice,) = answer.json()["choices"]
        text, usage = choice["text"], answer.json()["usage"]
    assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", "of tok")
    assert text.endswith("of tok" if include else "batch ")
    # The word that the stop string ends in was generated as well.
    assert usage["completion_tokens"] == len(text.split()) + (0 if include else 2)


async def test_a_stop_string_is_honoured_after_min_tokens_only(engine: Served) -> None:
    body = {"prompt": "x", "max_tokens": 200, "ignore_eos": True, "stop": "batch", "min_tokens": 60}
    answer = (await engine.http.post("/v1/completions", json=body)).json()
    assert answer["choices"][0]["stop_reason"] == "batch"
    assert 60 < answer["usage"]["completion_tokens"] < 200
    assert "batch" in answer["choices"][0]["text"]


async def test_a_stop_string_that_does_not_occur_changes_nothing(engine: Served) -> None:
    answer = await engine.sdk.chat.completions.create(
        model="tiny", messages=ASK, stop=["0123"], extra_body={"ewsjf_output_tokens": 12}
    )
    assert answer.choices[0].finish_reason == "stop"
    assert len((answer.choices[0].message.content or "").split()) == 12


# -- logprobs ---------------------------------------------------------------------------------------------


async def test_chat_logprobs_have_one_entry_per_token(engine: Served) -> None:
    request: Any = {
        "model": "tiny",
        "messages": ASK,
        "logprobs": True,
        "top_logprobs": 4,
        "seed": 5,
        "max_tokens": 9,
    }
    answer = await engine.sdk.chat.completions.create(**request)
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.content is not None
    assert answer.usage is not None
    assert len(logprobs.content) == answer.usage.completion_tokens
    assert "".join(item.token for item in logprobs.content) == answer.choices[0].message.content
    for item in logprobs.content:
        assert bytes(item.bytes or []) == item.token.encode()
        assert item.logprob <= 0.0
        assert len({top.token for top in item.top_logprobs}) == 4
        assert item.top_logprobs[0].token == item.token
        assert sum(math.exp(top.logprob) for top in item.top_logprobs) <= 1.0
        values = [top.logprob for top in item.top_logprobs]
        assert values == sorted(values, reverse=True)
    stream = await engine.sdk.chat.completions.create(**request, stream=True)
    parts = [chunk.choices[0].logprobs async for chunk in stream]
    streamed = [item for part in parts if part and part.content for item in part.content]
    assert streamed == logprobs.content


async def test_completion_logprobs_have_tokens_and_offsets(engine: Served) -> None:
    answer = await engine.sdk.completions.create(model="tiny", prompt="x", max_tokens=6, logprobs=3)
    choice = answer.choices[0]
    logprobs = choice.logprobs
    assert logprobs is not None
    assert logprobs.tokens is not None
    assert logprobs.text_offset is not None
    assert logprobs.token_logprobs is not None
    assert logprobs.top_logprobs is not None
    assert answer.usage is not None
    assert len(logprobs.tokens) == answer.usage.completion_tokens
    assert "".join(logprobs.tokens) == choice.text
    for at, token in zip(logprobs.text_offset, logprobs.tokens, strict=True):
        assert choice.text[at:].startswith(token)
    for token, value, top in zip(
        logprobs.tokens, logprobs.token_logprobs, logprobs.top_logprobs, strict=True
    ):
        assert value <= 0.0
        assert top[token] == value
        assert len(top) == 3


async def test_responses_include_logprobs_if_requested(engine: Served) -> None:
    answer = await engine.sdk.responses.create(
        model="tiny",
        input="x",
        include=["message.output_text.logprobs"],
        top_logprobs=2,
        max_output_tokens=5,
    )
    (item,) = answer.output
    assert item.type == "message"
    (part,) = item.content
    assert part.type == "output_text"
    assert part.logprobs is not None
    assert "".join(entry.token for entry in part.logprobs) == part.text
    assert all(len(entry.top_logprobs) == 2 for entry in part.logprobs)


async def test_a_stream_counts_its_tokens_continuously_if_requested(engine: Served) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    body = {"messages": ASK, "stream": True, "stream_options": options, "ewsjf_output_tokens": 6}
    chunks = events((await engine.http.post("/v1/chat/completions", json=body)).text)
    counts = [chunk["usage"]["completion_tokens"] for chunk in chunks]
    assert counts[0] == 0
    assert counts[-1] == 6
    assert counts == sorted(counts)


# -- ranges -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("parameters", "words"),
    [
        ({"temperature": -0.1}, "temperature must be non-negative, got -0.1. (parameter=temperature, value"),
        ({"temperature": 2.5}, "temperature must be in [0, 2], got 2.5. (parameter=temperature, value=2.5)"),
        ({"top_p": 0}, "top_p must be in (0, 1], got 0.0. (parameter=top_p, value=0.0)"),
        ({"top_p": 1.5}, "top_p must be in (0, 1], got 1.5. (parameter=top_p, value=1.5)"),
        ({"top_k": -2}, "top_k must be 0 (disable), or at least 1, got -2."),
        ({"min_p": 1.1}, "min_p must be in [0, 1], got 1.1."),
        ({"presence_penalty": 3}, "presence_penalty must be in [-2, 2], got 3.0."),
        ({"frequency_penalty": -3}, "frequency_penalty must be in [-2, 2], got -3.0."),
        ({"repetition_penalty": 0}, "repetition_penalty must be greater than zero, got 0.0."),
        ({"n": 2, "temperature": 0}, "n must be 1 when using greedy sampling, got 2."),
        ({"max_tokens": 3, "min_tokens": 4}, "min_tokens must be less than or equal to max_tokens=3, got 4."),
        ({"stop": ""}, "stop cannot contain an empty string."),
        ({"stop": ["a", "b", "c", "d", "e"]}, "validation error"),
        ({"prompt_logprobs": 1}, "prompt_logprobs is not supported by the emulated engine"),
        ({"echo": True}, "echo is not supported by the emulated engine"),
        ({"use_beam_search": True}, "use_beam_search is not supported by the emulated engine"),
        ({"return_token_ids": True}, "return_token_ids is not supported by the emulated engine"),
    ],
)
@pytest.mark.parametrize(
    ("path", "ask"), [("chat/completions", {"messages": ASK}), ("completions", {"prompt": "x"})]
)
async def test_a_parameter_out_of_range_is_rejected_with_its_value(
    engine: Served, path: str, ask: dict[str, Any], parameters: dict[str, Any], words: str
) -> None:
    answer = await engine.http.post(f"/v1/{path}", json={**ask, **parameters})
    assert answer.status_code == 400, answer.text
    assert words in answer.json()["error"]["message"]


@pytest.mark.parametrize(
    ("path", "parameters", "words"),
    [
        (
            "chat/completions",
            {"top_logprobs": 2},
            "when using `top_logprobs`, `logprobs` must be set to true.",
        ),
        ("chat/completions", {"logprobs": True, "top_logprobs": -2}, "must be a positive value or -1."),
        (
            "chat/completions",
            {"logprobs": True, "top_logprobs": 21},
            "Requested sample logprobs of 21, which is greater than max allowed: 20 (parameter=logprobs",
        ),
        ("completions", {"logprobs": -3}, "`logprobs` must be a positive value or -1. (parameter=logprobs"),
        ("completions", {"logprobs": 21}, "Requested sample logprobs of 21, which is greater than max allow"),
    ],
)
async def test_logprobs_out_of_range_are_rejected(
    engine: Served, path: str, parameters: dict[str, Any], words: str
) -> None:
    ask = {"messages": ASK} if path.startswith("chat") else {"prompt": "x"}
    answer = await engine.http.post(f"/v1/{path}", json={**ask, **parameters})
    assert answer.status_code == 400, answer.text
    assert words in answer.json()["error"]["message"]


async def test_usual_parameters_and_nulls_are_accepted(engine: Served) -> None:
    names = ("temperature", "top_p", "top_k", "min_p", "seed", "stop", "logit_bias", "tools", "tool_choice")
    for name in (*names, "response_format", "structured_outputs", "prompt_logprobs", "top_logprobs"):
        body = {"messages": ASK, "max_tokens": 1, name: None}
        answer = await engine.http.post("/v1/chat/completions", json=body)
        assert answer.status_code == 200, (name, answer.text)
    body = {"messages": ASK, "max_tokens": 1, "temperature": 0, "top_p": 1, "top_k": -1, "seed": 1}
    assert (await engine.http.post("/v1/chat/completions", json=body)).status_code == 200


@pytest.mark.parametrize(
    "path", ["/v1/audio/transcriptions", "/v1/audio/speech", "/rerank", "/score", "/pooling", "/classify"]
)
async def test_endpoints_that_a_text_model_lacks_are_not_found(engine: Served, path: str) -> None:
    answer = await engine.http.post(path, json={})
    assert answer.status_code == 404
    assert answer.json()["error"] == {"message": "Not Found", "type": "Not Found", "param": None, "code": 404}


async def test_a_path_has_one_method(engine: Served) -> None:
    answer = await engine.http.get("/v1/completions")
    assert answer.status_code == 405
    assert answer.json()["error"]["code"] == 405
