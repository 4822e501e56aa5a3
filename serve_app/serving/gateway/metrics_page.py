"""`/metrics` of all gateways and schedulers.

Every gateway serves the metrics of all of them, so that a scraper needs one address. A gateway that does not
answer quickly is missing from that scrape, with all of its series. Gateways cache pages for about a second at
most. If scrapes that are closer together reach different gateways, a counter may seem to fall.

Metrics expose models, replicas and load. If keys are configured, `/metrics` requires the scraper's own key
(`gateway.advanced.metrics_key`) or an admin's; otherwise it is open, as are all endpoints.

`merge` and `as_openmetrics` convert pages in Prometheus' formats. Pages are merged, because scrapers reject a
page that describes a metric twice or separates its samples. Exemplars exist in the OpenMetrics format only.
The gateway renders its own page in that format. Pages of schedulers have no exemplars and are converted: the
formats differ in counter names and the end marker.
"""

import asyncio
import hashlib
import hmac
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence

from serve_app.core.settings_base import settings
from serve_app.serving.cached_page import CachedPage
from serve_app.serving.channel.scheduler_client import SchedulerClient
from serve_app.serving.gateway.answer.responses import ForbiddenError
from serve_app.serving.gateway.keys import Caller, Secret
from serve_app.serving.gateway.telemetry import Telemetry

# Suffixes that the text format appends to a metric's name in its samples.
_SUFFIXES = frozenset({"", "_total", "_created", "_bucket", "_sum", "_count", "_info"})
_END = "# EOF\n"


def merge(pages: Iterable[str]) -> str:
    """Merge pages so that each metric occurs once; for equal labels, the first sample is used."""
    families: dict[str, _Family] = {}
    for page in pages:
        family: _Family | None = None
        for line in page.splitlines():
            if not line.strip():
                continue
            if line.startswith("#"):
                family = _described(families, line) or family
            else:
                family = _owner(families, family, line)
                family.samples.setdefault(line.rpartition(" ")[0] or line, line)
    return "".join(family.text() for family in families.values())


def merge_openmetrics(own: str, pages: Iterable[str]) -> str:
    """Merge a page in the OpenMetrics format with pages in the text format."""
    return merge((own, *map(as_openmetrics, pages))) + _END


def as_openmetrics(page: str) -> str:
    """Convert a page from the text format to OpenMetrics, without the end marker."""
    return "".join(f"{line}\n" for line in _rewritten(page.splitlines()))


def _rewritten(lines: Iterable[str]) -> Iterator[str]:
    help_of: dict[str, str] = {}
    skipped = ""
    for line in lines:
        words = line.split(" ", 3)
        if line.startswith("# HELP ") and len(words) > 2:
            # Written with the type, because the type decides the name.
            help_of[words[2]] = words[3] if len(words) > 3 else ""
        elif line.startswith("# TYPE ") and len(words) > 3:
            name, kind = words[2], words[3]
            # In both formats these are samples of a counter or histogram, so the name is reserved.
            skipped = name if name.endswith("_created") and kind == "gauge" else ""
            if not skipped:
                yield from _head(name, kind, help_of.get(name))
        elif line.strip() and not line.startswith("#") and not (skipped and line.startswith(skipped)):
            yield line


def _head(name: str, kind: str, text: str | None) -> Iterator[str]:
    """Yield a metric's description; OpenMetrics names a counter without the `_total` of its samples."""
    if kind == "counter":
        name, kind = (name.removesuffix("_total"), kind) if name.endswith("_total") else (name, "unknown")
    elif kind == "untyped":
        kind = "unknown"
    if text is not None:
        escaped = text.replace('"', '\\"')
        yield f"# HELP {name} {escaped}"
    yield f"# TYPE {name} {kind}"


class _Family:
    """A metric: its description and its samples."""

    __slots__ = ("comments", "name", "samples")

    def __init__(self, name: str) -> None:
        self.name = name
        self.comments: dict[str, str] = {}
        self.samples: dict[str, str] = {}

    def text(self) -> str:
        return "".join(f"{line}\n" for line in (*self.comments.values(), *self.samples.values()))


def _described(families: dict[str, _Family], line: str) -> _Family | None:
    words = line.split(" ", 3)
    if len(words) < 3 or words[1] not in ("HELP", "TYPE"):
        return None
    family = families.setdefault(words[2], _Family(words[2]))
    family.comments.setdefault(words[1], line)
    return family


def _owner(families: dict[str, _Family], current: _Family | None, line: str) -> _Family:
    """Return the metric of a sample: the one described last (x_bucket belongs to x), or a new one."""
    name = line.partition("{")[0].partition(" ")[0]
    if current is not None and name.removeprefix(current.name) in _SUFFIXES:
        return current
    return families.setdefault(name, _Family(name))


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
