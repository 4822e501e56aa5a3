"""Router: the declared routes of the gateway, and the handler of a request's method and path.

A path is literal or has one parameter, as `/v1/batches/{batch_id}/cancel` has, which is passed to the handler
after the request. Literal paths take precedence.
"""

import re
from collections.abc import Callable, Coroutine, Iterable, Mapping
from typing import NamedTuple

from serve_app.errors import Outcome
from serve_app.serving.gateway.answer.responses import MethodRejected, RequestRejected

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
