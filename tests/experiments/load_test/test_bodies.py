import json

import pytest

from experiments.common.load_test.open_loop import ApiEndpoint, BodyFactory, BodyKind, BodySettings
from serve_app.lab.workloads import PREFIX_BLOCK_TOKENS, TraceRequest
from serve_app.request import PriorityClass


def request(prompt_tokens: int = 100, **changes: object) -> TraceRequest:
    fields = {"arrival_s": 0.0, "prompt_tokens": prompt_tokens, "output_tokens": 7, **changes}
    return TraceRequest(**fields)  # type: ignore[arg-type]  # the fields are those of a request


def sent(factory: BodyFactory, number: int, of: TraceRequest) -> tuple[dict[str, str], dict[str, object]]:
    return factory.headers(number, of), json.loads(factory.body(number, of))


def test_an_emulated_body_states_exact_counts_and_requests_usage() -> None:
    headers, body = sent(BodyFactory(BodySettings(model="m")), 4, request(100))
    assert headers["x-request-id"] == "bench-4"
    assert (body["ewsjf_prompt_tokens"], body["ewsjf_output_tokens"], body["max_tokens"]) == (100, 7, 7)
    assert body["stream_options"] == {"include_usage": True}


def test_a_text_body_has_no_fields_of_ours() -> None:
    settings = BodySettings(model="m", kind=BodyKind.TEXT, ignore_eos=True)
    _, body = sent(BodyFactory(settings), 1, request())
    assert set(body) == {"model", "stream", "stream_options", "ignore_eos", "max_tokens", "messages"}


@pytest.mark.parametrize(("stated", "expected"), [(None, 7), (500, 500), (0, None)])
def test_clients_state_the_true_length_or_another_or_none(stated: int | None, expected: int | None) -> None:
    _, body = sent(BodyFactory(BodySettings(model="m", max_tokens=stated)), 1, request())
    assert body.get("max_tokens") == expected


@pytest.mark.parametrize("prompt_tokens", [1, 2, 3, 50, 5000, 400_000])
def test_the_text_has_the_requested_size(prompt_tokens: int) -> None:
    factory = BodyFactory(BodySettings(model="m"))
    assert len(factory.text(3, request(prompt_tokens))) == prompt_tokens * 5


def test_no_two_prompts_begin_alike() -> None:
    factory = BodyFactory(BodySettings(model="m"))
    beginnings = {factory.text(number, request(100))[:20] for number in range(5000)}
    assert len(beginnings) == 5000


def test_prompts_share_the_blocks_in_the_trace_and_state_no_length() -> None:
    factory = BodyFactory(BodySettings(model="m"))
    block_bytes = PREFIX_BLOCK_TOKENS * 5
    first = factory.text(1, request(1100, prefix=(0, 5)))
    second = factory.text(2, request(1100, prefix=(0, 6)))
    assert first[:block_bytes] == second[:block_bytes]
    assert first[block_bytes : 2 * block_bytes] != second[block_bytes : 2 * block_bytes]
    assert len(first) == 5500
    assert len(factory.text(1, request(100, prefix=(0,)))) == 500
    _, body = sent(factory, 1, request(1100, prefix=(0, 5)))
    assert "ewsjf_prompt_tokens" not in body


def test_tenant_and_class_travel_as_headers() -> None:
    factory = BodyFactory(BodySettings(model="m", endpoint=ApiEndpoint.COMPLETIONS))
    headers, body = sent(factory, 1, request(tenant="search", priority=PriorityClass.BATCH))
    assert factory.path == "/v1/completions"
    assert (headers["x-tenant"], headers["x-priority"]) == ("search", "batch")
    assert isinstance(body["prompt"], str)
    plain, _ = sent(factory, 1, request())
    assert "x-tenant" not in plain
    assert "x-priority" not in plain


def test_settings_that_cannot_work_are_rejected() -> None:
    with pytest.raises(ValueError, match="max_tokens must not be negative, got -1"):
        BodySettings(model="m", max_tokens=-1)
    with pytest.raises(ValueError, match="ignore_eos is for real engines"):
        BodySettings(model="m", ignore_eos=True)
