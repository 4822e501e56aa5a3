"""`/metrics`: who may read it, and the page of all gateways and of the schedulers behind them.

Whichever gateway is asked, it shows them all, so one address suffices for a scraper. A gateway that did not
answer in a moment is missing, with all of its series, and is there again next time.

The page tells models, replicas and how busy they are, which is nobody's business but the operator's. Where
keys are configured, it takes the scraper's own (`gateway.advanced.metrics_key`) or an admin's. Where none
are, it is open, as all else is.
"""

import asyncio
import hashlib
import hmac
from collections.abc import Callable, Collection, Mapping, Sequence

from serve_app.serving.cached_page import CachedPage
from serve_app.serving.channel.scheduler_client import SchedulerClient
from serve_app.serving.gateway.answer.responses import ForbiddenError
from serve_app.serving.gateway.keys import Caller, Secret
from serve_app.serving.gateway.scraping.exposition import merge, merge_openmetrics
from serve_app.serving.gateway.telemetry import Telemetry
from serve_app.settings_base import settings

_TEXT = (b"content-type", b"text/plain; version=0.0.4; charset=utf-8")
_OPENMETRICS = (b"content-type", b"application/openmetrics-text; version=1.0.0; charset=utf-8")


@settings(block="metrics_key")
class MetricsKey(Secret):
    """The key of a scraper, which may read `/metrics` and nothing else."""

    @property
    def purpose(self) -> str:
        """The secret's name in messages."""
        return "gateway.advanced.metrics_key"


class MetricsEndpoint:
    """The page, and its door.

    Args:
        key: of the scraper.
        asks_for_keys: whether callers need keys at all.
        authenticate: finds who calls by the headers of a request; raises `RequestRefused`.

    Raises:
        SettingsError: the scraper's key cannot be read.
    """

    def __init__(
        self,
        telemetry: Telemetry,
        schedulers: Collection[SchedulerClient],
        *,
        key: MetricsKey | None,
        asks_for_keys: bool,
        authenticate: Callable[[Mapping[bytes, bytes]], Caller],
    ) -> None:
        # A scheduler stands once under each of its model's names.
        self._schedulers = tuple({id(scheduler): scheduler for scheduler in schedulers}.values())
        self.change(key, asks_for_keys=asks_for_keys)
        self._authenticate = authenticate
        self._own = CachedPage(_nothing, lambda _: telemetry.exposition())
        self._text = CachedPage(self._gather, lambda pages: merge((telemetry.exposition(), *pages)))
        self._openmetrics = CachedPage(
            self._gather, lambda pages: merge_openmetrics(telemetry.openmetrics(), pages)
        )
        for scheduler in self._schedulers:
            scheduler.show(self._own.text)

    def change(self, key: MetricsKey | None, *, asks_for_keys: bool) -> None:
        """Ask for another key from now on.

        Raises:
            SettingsError: it cannot be read; then the one of before holds.
        """
        self._digest = None if key is None else _digest(key.secret().encode())
        self._asks_for_keys = asks_for_keys

    def check(self, headers: Mapping[bytes, bytes]) -> None:
        """Refuse whoever may not read the page.

        Raises:
            RequestRefused: keys are asked for, and this is neither the scraper's nor an admin's.
        """
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
        """The metrics of all gateways and schedulers, drawn up a moment ago, after their content type.

        Args:
            accept: what the scraper reads; OpenMetrics, which has exemplars, where it says so.
        """
        if prefers_openmetrics(accept):
            return _OPENMETRICS, (await self._openmetrics.text()).encode()
        return _TEXT, (await self._text.text()).encode()

    async def _gather(self) -> Sequence[str]:
        return await asyncio.gather(*(scheduler.exposition() for scheduler in self._schedulers))


async def _nothing() -> None:
    """Nothing has to be gathered."""


def prefers_openmetrics(accept: bytes) -> bool:
    """Whether a scraper reads OpenMetrics at least as gladly as the text format."""
    gladness = {b"application/openmetrics-text": 0.0, b"text/plain": 0.0}
    for accepted in accept.lower().split(b","):
        kind, *parameters = (part.strip() for part in accepted.split(b";"))
        if kind in gladness:
            stated = next((part[2:] for part in parameters if part.startswith(b"q=")), b"1")
            gladness[kind] = max(gladness[kind], _number(stated))
    openmetrics, text = gladness.values()
    return openmetrics > 0 and openmetrics >= text


def _number(written: bytes) -> float:
    try:
        return float(written)
    except ValueError:
        return 0.0


def _digest(secret: bytes) -> bytes:
    return hashlib.sha256(secret).digest()
