"""Cross-origin resource sharing (CORS): web pages that may call the gateway from a browser.

Before a request with a key or a JSON body, browsers send a preflight without a key. Starlette's middleware
decides; rejected preflights get the gateway's error format.
"""

from starlette.datastructures import Headers
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import Response
from starlette.types import ASGIApp

from serve_app.core.settings_base import settings
from serve_app.errors import Outcome, SettingsError
from serve_app.serving.gateway.answer.responses import RATE_LIMIT_HEADERS, RequestRejected

ANY_ORIGIN = "*"

_METHODS = ("GET", "HEAD", "POST")
# Response headers that scripts may read in addition to the CORS-safelisted ones.
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


def with_cors(app: ASGIApp, settings: CorsSettings) -> ASGIApp:
    """Wrap `app` with CORS for the allowed origins, or return it unchanged if there are none."""
    return _Cors(app, settings) if settings.allow_origins else app


class _Cors(CORSMiddleware):
    """Middleware that adds CORS headers to all answers, including streams, and answers preflights."""

    def __init__(self, app: ASGIApp, settings: CorsSettings) -> None:
        super().__init__(
            app,
            allow_origins=settings.allow_origins,
            allow_methods=_METHODS,
            # SDKs send custom headers, and add others with each release.
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
        rejection = RequestRejected(
            Outcome.REJECTED_INVALID,
            f"{bytes(found.body).decode()}: {request_headers['origin'][:200]!r} is not allowed to do this; "
            "see gateway.cors",
            code="cors_rejected",
        )
        return Response(rejection.body(), found.status_code, own, media_type="application/json")


def _is_origin(text: str) -> bool:
    scheme, separator, host = text.partition("://")
    return bool(separator and scheme and host) and not set(host) & set("/?#@ ") and text == text.lower()
