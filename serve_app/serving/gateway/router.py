"""Router: the declared routes of the gateway, and the handler of a request's method and path.

- `Router`: a path is literal or has one parameter, as `/v1/batches/{batch_id}/cancel` has, which is passed to
  the handler after the request. Literal paths take precedence.
- `Cors`: web pages that may call the gateway from a browser (cross-origin resource sharing). Before a request
  with a key or a JSON body, browsers send a preflight without a key. Starlette's middleware decides; rejected
  preflights get the gateway's error format.
"""

import contextlib
import re
from collections.abc import Callable, Coroutine, Iterable, Mapping
from typing import NamedTuple

from starlette.datastructures import Headers
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from serve_app.core.settings_base import settings
from serve_app.errors import Outcome, SettingsError
from serve_app.serving.gateway.answer.responses import (
    DROPPED_REASON_HEADER,
    RATE_LIMIT_HEADERS,
    ClientExchange,
    MethodRejected,
    RequestRejected,
)

ANY_ORIGIN = "*"

_METHODS = ("GET", "HEAD", "POST")
# Response headers that scripts may read in addition to the CORS-safelisted ones.
_EXPOSED = (
    "request-id",
    "retry-after",
    "retry-after-ms",
    "x-estimated-tokens",
    "x-length-queue",
    DROPPED_REASON_HEADER.decode(),
    "x-pool",
    "x-queue-wait-ms",
    *RATE_LIMIT_HEADERS,
    "x-replica",
    "x-request-id",
    "x-served-model",
)
# Lifetime of a preflight's answer in the browser's cache.
_MAX_AGE_S = 600


@settings(block="cors")
class CorsSettings:
    """Web pages that may call the gateways from a browser (CORS).

    Attributes:
        allow_origins: origins as browsers send them, such as `https://chat.example.com`, or `"*"` for all
            pages; empty allows none.
    """

    allow_origins: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for origin in self.allow_origins:
            if origin != ANY_ORIGIN and not _is_origin(origin):
                raise SettingsError(
                    f"cors.allow_origins must name origins such as https://chat.example.com, without a path "
                    f"or a slash at the end, or be '*', got {origin!r}"
                )


class Cors:
    """Answers to preflights, and the CORS headers of all other answers."""

    def __init__(self, settings: CorsSettings) -> None:
        self._middleware = CORSMiddleware(
            _no_app,
            allow_origins=settings.allow_origins,
            allow_methods=_METHODS,
            # SDKs send custom headers, and add others with each release.
            allow_headers=(ANY_ORIGIN,),
            allow_private_network=ANY_ORIGIN not in settings.allow_origins,
            expose_headers=_EXPOSED,
            max_age=_MAX_AGE_S,
        )

    def serve(self, exchange: ClientExchange) -> bool:
        """Answer a preflight, and add the headers of the answer to any other request of a web page.

        Returns:
            True if the request was answered.
        """
        headers = Headers(raw=exchange.headers)
        if "origin" not in headers:
            return False
        if exchange.method == "OPTIONS" and "access-control-request-method" in headers:
            response = self._preflight_response(headers)
            body = bytes(response.body)
            exchange.start_response(response.status_code, response.raw_headers)
            exchange.write_chunk(body, ends=True)
            return True
        start: Message = {"type": "http.response.start", "status": 200, "headers": []}
        # Starlette adds the headers to the start of a response, without waiting for anything.
        with contextlib.suppress(StopIteration):
            self._middleware.send(start, _drop, headers).send(None)
        exchange.added_headers += start["headers"]
        return False

    def _preflight_response(self, request_headers: Headers) -> Response:
        found = self._middleware.preflight_response(request_headers)
        own = {name: value for name, value in found.headers.items() if not name.startswith("content-")}
        if found.status_code == 200:
            return Response(status_code=204, headers=own)
        rejection = RequestRejected(
            Outcome.REJECTED_INVALID,
            f"{bytes(found.body).decode()}: {request_headers['origin'][:200]!r} is not allowed to do this; "
            "see gateway.cors",
            code="cors_rejected",
        )
        return Response(rejection.body(), found.status_code, own, media_type="application/json")


async def _no_app(_: Scope, __: Receive, ___: Send) -> None:
    raise AssertionError("the middleware serves no requests")


async def _drop(message: Message) -> None:
    """Send nothing."""


def _is_origin(text: str) -> bool:
    scheme, separator, host = text.partition("://")
    return bool(separator and scheme and host) and not set(host) & set("/?#@ ") and text == text.lower()


Handler = Callable[..., Coroutine[None, None, None] | None]
"""Serves a request, at once or by the coroutine that it returns."""

ANY = ".+"
"""Pattern of a parameter that may contain slashes."""
_LONGEST_SHOWN = 200


class HttpRoute(NamedTuple):
    """One method of one path.

    Attributes:
        handler: receives the request and, if the path has one, the parameter.
        summary: description of the answer for the reference of endpoints; empty for files of a page.
        parameter: regular expression for the parameter.
    """

    method: str
    path: str
    handler: Handler
    summary: str
    parameter: str = ANY


class _Path:
    """Handlers of one path by method."""

    def __init__(self, route: HttpRoute) -> None:
        name = re.search(r"\{\w+\}", route.path)
        before, after = (route.path, "") if name is None else re.split(r"\{\w+\}", route.path)
        self.is_literal = name is None
        self.pattern = re.compile(f"{re.escape(before)}({route.parameter}){re.escape(after)}")
        self.handlers: dict[str, Handler] = {}


class Router:
    """Routes by path and method."""

    def __init__(self, routes: Iterable[HttpRoute]) -> None:
        self.routes = tuple(routes)
        paths: dict[str, _Path] = {}
        for route in self.routes:
            found = paths.setdefault(route.path, _Path(route))
            if found.handlers.setdefault(route.method, route.handler) is not route.handler:
                raise ValueError(f"two routes for {route.method} {route.path}")
        self._literal = {path: found for path, found in paths.items() if found.is_literal}
        self._with_parameter = [found for found in paths.values() if not found.is_literal]

    def is_literal(self, path: str) -> bool:
        """Return whether a path is declared without a parameter. Clients cannot choose such a path."""
        return path in self._literal

    def find(self, method: str, path: str) -> tuple[Handler, tuple[str, ...]]:
        """Return the handler of a request, and the parameters of its path.

        Raises:
            RequestRejected: the path is unknown, or does not have this method.
        """
        found = self._find(path)
        if found is None:
            raise self._unknown(path)
        handlers, parameters = found
        handler = handlers.get("GET" if method == "HEAD" else method)
        if handler is None:
            raise MethodRejected(method, path, ", ".join(handlers))
        return handler, parameters

    def _find(self, path: str) -> tuple[Mapping[str, Handler], tuple[str, ...]] | None:
        literal = self._literal.get(path)
        if literal is not None:
            return literal.handlers, ()
        if path.endswith("/"):
            return None
        for each in self._with_parameter:
            if (found := each.pattern.fullmatch(path)) is not None:
                return each.handlers, found.groups()
        return None

    def _unknown(self, path: str) -> RequestRejected:
        # A base URL lacks /v1, has it twice, or has a slash too many.
        bare = "/" + path.removeprefix("/v1").strip("/")
        near = next((each for each in (bare, f"/v1{bare}") if self._find(each) is not None), None)
        advice = "" if near is None else f": use {near[:_LONGEST_SHOWN]}"
        return RequestRejected(
            Outcome.REJECTED_INVALID,
            f"unknown path {path[:_LONGEST_SHOWN]}{advice}",
            code="not_found",
            status=404,
        )
