import asyncio

import pytest

from serve_app.engines.adapters import PageResponse, identify
from serve_app.errors import EngineError
from tests.engines.adapters.pages import models, recorded, server


def test_an_unknown_server_is_served_by_its_list_of_models() -> None:
    found = asyncio.run(identify(server({"/v1/models": models("m", owner="me", max_model_len=2048)})))
    assert (found.kind, found.limits.max_model_len) == ("OpenAI-compatible", 2048)
    assert (found.metrics_path, found.health_path) == (None, "/v1/models")
    assert found.read(b"anything").waiting is None


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"context_window": 2048}, 2048),
        ({"context_length": 2048}, 2048),
        ({"max_context_length": 2048}, 2048),
        ({"meta": {"n_ctx": 2048, "n_ctx_train": 131_072}}, 2048),
        ({"max_model_len": 2048, "context_length": 4096}, 2048),
        ({"context_window": 0}, None),
        ({"meta": {"n_ctx_train": 131_072}}, None),
        ({"context_length": "2048"}, None),
    ],
)
def test_the_context_has_several_names_in_model_lists(
    fields: dict[str, object], expected: int | None
) -> None:
    found = asyncio.run(identify(server({"/v1/models": models("m", owner="me", **fields)})))
    assert found.limits.max_model_len == expected


def test_a_list_with_several_contexts_states_none_of_them() -> None:
    entries = [{"id": "a", "context_length": 4096}, {"id": "b", "context_length": 8192}]
    found = asyncio.run(identify(server({"/v1/models": {"data": entries}})))
    assert found.limits.max_model_len is None


def test_no_page_is_requested_twice() -> None:
    log: list[str] = []
    pages = {"/v1/models": models("m", owner="vllm"), "/metrics": recorded("vllm-0.32.0-idle.txt")}
    asyncio.run(identify(server(pages, log=log)))
    assert sorted(log) == sorted(set(log))


def test_a_rejected_key_is_named() -> None:
    with pytest.raises(EngineError, match=r"/v1/models returned 401: set api_key to the server's key"):
        asyncio.run(identify(server({"/v1/models": 401})))


@pytest.mark.parametrize("page", [b"<html>", {"data": [{"name": "m"}]}, {"data": None}, []])
def test_an_invalid_model_list_is_shown(page: object) -> None:
    with pytest.raises(EngineError, match=r"/v1/models is not a list of models, .*: correct the URL"):
        asyncio.run(identify(server({"/v1/models": page})))


def test_a_server_without_a_list_of_models_is_no_server() -> None:
    with pytest.raises(EngineError, match="/v1/models returned 404"):
        asyncio.run(identify(server({})))


def test_silence_is_passed_on() -> None:
    async def silent(path: str) -> PageResponse:
        raise EngineError(f"{path}: nothing answers")

    with pytest.raises(EngineError, match="nothing answers"):
        asyncio.run(identify(silent))
