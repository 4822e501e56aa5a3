"""`/metrics` of all gateways and schedulers.

Every gateway serves the metrics of all of them, so that a scraper needs one address. A gateway that does not
answer quickly is missing from that scrape, with all of its series. Gateways cache pages for about a second at
most. If scrapes that are closer together reach different gateways, a counter may seem to fall.

Metrics expose models, replicas and load. If keys are configured, `/metrics` requires the scraper's own key
(`gateway.advanced.metrics_key`) or an admin's; otherwise it is open, as are all endpoints.
"""

import asyncio
import hashlib
import hmac
from collections.abc import Callable, Collection, Mapping, Sequence

from serve_app.core.settings_base import settings
from serve_app.serving.cached_page import CachedPage
from serve_app.serving.channel.scheduler_client import SchedulerClient
from serve_app.serving.gateway.answer.responses import ForbiddenError
from serve_app.serving.gateway.exposition import merge, merge_openmetrics
from serve_app.serving.gateway.keys import Caller, Secret
from serve_app.serving.gateway.telemetry import Telemetry

_TEXT = (b"content-type", b"text/plain; version=0.0.4; charset=utf-8")
_OPENMETRICS = (b"content-type", b"application/openmetrics-text; version=1.0.0; charset=utf-8")


@settings(block="metrics_key")
class MetricsKey(Secret):
    """Key of a scraper; it allows reading `/metrics` and nothing else."""

    @property
    def purpose(self) -> str:
        """Name of the secret in messages."""
        return "gateway.advanced.metrics_key"


class MetricsEndpoint:
    """The `/metrics` endpoint and its access control.

    Args:
        key: key of the scraper.
        requires_keys: whether callers need keys at all.
        authenticate: returns the caller for the headers of a request; raises `RequestRejected`.

    Raises:
        SettingsError: the scraper's key cannot be read.
    """

    def __init__(
        self,
        telemetry: Telemetry,
        schedulers: Collection[SchedulerClient],
        *,
        key: MetricsKey | None,
        requires_keys: bool,
        authenticate: Callable[[Mapping[bytes, bytes]], Caller],
    ) -> None:
        # Each of a model's names maps to the same scheduler.
        self._schedulers = tuple({id(scheduler): scheduler for scheduler in schedulers}.values())
        self.change(key, requires_keys=requires_keys)
        self._authenticate = authenticate
        self._own = CachedPage(_nothing, lambda _: telemetry.exposition())
        self._text = CachedPage(self._gather, lambda pages: merge((telemetry.exposition(), *pages)))
        self._openmetrics = CachedPage(
            self._gather, lambda pages: merge_openmetrics(telemetry.openmetrics(), pages)
        )
        for scheduler in self._schedulers:
            scheduler.register_metrics(self._own.text)

    def change(self, key: MetricsKey | None, *, requires_keys: bool) -> None:
        """Replace the scraper's key.

        Raises:
            SettingsError: the key cannot be read; the previous one stays in effect.
        """
        self._digest = None if key is None else _digest(key.secret().encode())
        self._asks_for_keys = requires_keys

    def check(self, headers: Mapping[bytes, bytes]) -> None:
        """Raise `RequestRejected` without the scraper's key or an admin's, if keys are configured."""
        if self._digest is None and not self._asks_for_keys:
            return
        scheme, _, secret = headers.get(b"authorization", b"").partition(b" ")
        is_scraper = self._digest is not None and hmac.compare_digest(_digest(secret.strip()), self._digest)
        if is_scraper and scheme.lower() == b"bearer":
            return
        if not self._authenticate(headers).is_admin:
            raise ForbiddenError(
                "metrics need a key: send that of gateway.advanced.metrics_key, or one with admin: true, as "
                "Authorization: Bearer KEY",
            )

    async def page(self, accept: bytes) -> tuple[tuple[bytes, bytes], bytes]:
        """Return content type and text of all metrics, in the OpenMetrics format if `accept` prefers it."""
        if prefers_openmetrics(accept):
            return _OPENMETRICS, (await self._openmetrics.text()).encode()
        return _TEXT, (await self._text.text()).encode()

    async def _gather(self) -> Sequence[str]:
        # All of them know the same gateways, so one asks them.
        connected = [scheduler for scheduler in self._schedulers if scheduler.is_connected]
        pages = (each.exposition(with_gateways=each is connected[0]) for each in connected)
        return await asyncio.gather(*pages)


async def _nothing() -> None:
    """Gather nothing."""


def prefers_openmetrics(accept: bytes) -> bool:
    """Return whether an `Accept` header ranks OpenMetrics at least as high as the text format."""
    quality = {b"application/openmetrics-text": 0.0, b"text/plain": 0.0}
    for accepted in accept.lower().split(b","):
        kind, *parameters = (part.strip() for part in accepted.split(b";"))
        if kind in quality:
            stated = next((part[2:] for part in parameters if part.startswith(b"q=")), b"1")
            quality[kind] = max(quality[kind], _number(stated))
    openmetrics, text = quality.values()
    return openmetrics > 0 and openmetrics >= text


def _number(written: bytes) -> float:
    try:
        return float(written)
    except ValueError:
        return 0.0


def _digest(secret: bytes) -> bytes:
    return hashlib.sha256(secret).digest()
