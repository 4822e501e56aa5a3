"""Cross-origin requests: which pages in browsers may call the gateway (CORS).

A browser asks before it sends a request with a key or a JSON body to another origin: a preflight, which
carries no key. The rules are Starlette's middleware's; the answers to preflights have the gateway's own form.
"""

from starlette.datastructures import Headers
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import Response
from starlette.types import ASGIApp

from serve_app.core.settings_base import settings
from serve_app.errors import Outcome, SettingsError
from serve_app.serving.gateway.answer.responses import RATE_LIMIT_HEADERS, RequestRefused

ANY_ORIGIN = "*"

_METHODS = ("GET", "HEAD", "POST")
# What a page's script may read beside the few headers that every script may.
_EXPOSED = (
    "request-id",
    "retry-after",
    "retry-after-ms",
    "x-estimated-tokens",
    "x-length-queue",
    "x-pool",
    "x-queue-wait-ms",
    *RATE_LIMIT_HEADERS,
    "x-replica",
    "x-request-id",
)
# A browser need not ask again for so long.
_MAX_AGE_S = 600


@settings(block="cors")
class CorsSettings:
    """Which web pages may call the gateways from a browser.

    Attributes:
        allow_origins: origins as browsers name them, such as `https://chat.example.com`, or `"*"` for every
            page; empty allows none.
    """

    allow_origins: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for origin in self.allow_origins:
            if origin != ANY_ORIGIN and not _is_origin(origin):
                raise SettingsError(
                    f"cors.allow_origins must name origins such as https://chat.example.com, without a path "
                    f"or a slash at the end, or be '*', got {origin!r}"
                )


def with_cors(app: ASGIApp, settings: CorsSettings) -> ASGIApp:
    """The app for pages of these origins; the app itself where there are none, so that it costs nothing."""
    return _Cors(app, settings) if settings.allow_origins else app


class _Cors(CORSMiddleware):
    """Adds the headers to every answer, errors and streams included, and answers preflights itself."""

    def __init__(self, app: ASGIApp, settings: CorsSettings) -> None:
        super().__init__(
            app,
            allow_origins=settings.allow_origins,
            allow_methods=_METHODS,
            # SDKs send headers of their own, and add others with each release.
            allow_headers=(ANY_ORIGIN,),
            allow_private_network=ANY_ORIGIN not in settings.allow_origins,
            expose_headers=_EXPOSED,
            max_age=_MAX_AGE_S,
        )

    def preflight_response(self, request_headers: Headers) -> Response:
        found = super().preflight_response(request_headers)
        own = {name: value for name, value in found.headers.items() if not name.startswith("content-")}
        if found.status_code == 200:
            return Response(status_code=204, headers=own)
        refusal = RequestRefused(
            Outcome.REJECTED_INVALID,
            f"{bytes(found.body).decode()}: {request_headers['origin'][:200]!r} is not allowed to do this; "
            "see gateway.cors",
            code="cors_refused",
        )
        return Response(refusal.body(), found.status_code, own, media_type="application/json")


def _is_origin(text: str) -> bool:
    scheme, separator, host = text.partition("://")
    return bool(separator and scheme and host) and not set(host) & set("/?#@ ") and text == text.lower()
