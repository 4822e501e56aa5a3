from typing import Any

import pytest

from serve_app.serving.gateway.answer.responses import MethodRejected, RequestRejected
from serve_app.serving.gateway.router import HttpRoute, Router


async def show(*_: Any) -> None:
    """Stand for a handler."""


async def cancel(*_: Any) -> None:
    """Stand for another handler."""


ROUTER = Router(
    (
        HttpRoute("GET", "/v1/jobs", show, ""),
        HttpRoute("POST", "/v1/jobs/{job}/cancel", cancel, "", "[a-z]+"),
        HttpRoute("GET", "/v1/jobs/{job}", show, "", "[a-z]+"),
        HttpRoute("DELETE", "/v1/jobs/{job}", cancel, "", "[a-z]+"),
        HttpRoute("GET", "/v1/jobs/all", cancel, ""),
        HttpRoute("GET", "/names/{name}", show, ""),
    )
)


@pytest.mark.parametrize(
    ("method", "path", "handler", "parameters"),
    [
        ("GET", "/v1/jobs", show, ()),
        ("HEAD", "/v1/jobs", show, ()),
        ("GET", "/v1/jobs/one", show, ("one",)),
        ("DELETE", "/v1/jobs/one", cancel, ("one",)),
        ("POST", "/v1/jobs/one/cancel", cancel, ("one",)),
        # A literal path precedes one with a parameter.
        ("GET", "/v1/jobs/all", cancel, ()),
        ("GET", "/names/org/name", show, ("org/name",)),
    ],
)
def test_a_request_gets_the_handler_of_its_method_and_path(
    method: str, path: str, handler: Any, parameters: tuple[str, ...]
) -> None:
    assert ROUTER.find(method, path) == (handler, parameters)


@pytest.mark.parametrize(
    ("path", "advice"),
    [
        ("/v1/jobs/One", ""),
        ("/v1/jobs/", ": use /v1/jobs"),
        ("/jobs/one/", ": use /v1/jobs/one"),
        ("/v1/names/x", ": use /names/x"),
        ("/v1/v1/jobs", ": use /v1/jobs"),
        ("/v1/jobs/one/stop", ""),
    ],
)
def test_an_unknown_path_is_rejected_with_the_nearest_one(path: str, advice: str) -> None:
    with pytest.raises(RequestRejected) as rejected:
        ROUTER.find("GET", path)
    assert (rejected.value.status, rejected.value.message) == (404, f"unknown path {path}{advice}")


def test_another_method_is_rejected_with_those_of_the_path() -> None:
    with pytest.raises(MethodRejected, match=r"PUT is not allowed for /v1/jobs/one: use GET, DELETE"):
        ROUTER.find("PUT", "/v1/jobs/one")


def test_two_handlers_of_one_method_and_path_are_a_mistake() -> None:
    with pytest.raises(ValueError, match="two routes for GET /a"):
        Router((HttpRoute("GET", "/a", show, ""), HttpRoute("GET", "/a", cancel, "")))


def test_only_paths_without_a_parameter_are_literal() -> None:
    assert ROUTER.is_literal("/v1/jobs/all")
    assert not ROUTER.is_literal("/v1/jobs/one")
