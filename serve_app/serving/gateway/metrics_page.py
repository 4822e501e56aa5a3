"""`/metrics`: who may read it, and the page of all gateways and of the schedulers behind them.

Whichever gateway is asked, it shows them all, so one address suffices for a scraper. A gateway that did not
answer in a moment is missing, with all of its series, and is there again next time.

The page tells models, replicas and how busy they are, which is nobody's business but the operator's. Where
keys are configured, it takes the scraper's own (`gateway.advanced.metrics_key`) or an admin's. Where none
are, it is open, as all else is.

Each scheduler writes its own page, and two pages that describe the same metric may not simply follow each
other: a scraper refuses a metric that is described twice or whose samples lie apart. So pages are merged.
Exemplars exist in OpenMetrics' format alone. The gateway writes its own page in it, and those of schedulers,
which have none, are rewritten: the two formats differ in what they call a counter, and in an end.
"""

import asyncio
import hashlib
import hmac
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence

from serve_app.serving.cached_page import CachedPage
from serve_app.serving.channel.scheduler_client import SchedulerClient
from serve_app.serving.gateway.answer.responses import ForbiddenError
from serve_app.serving.gateway.keys import Caller, Secret
from serve_app.serving.gateway.telemetry import Telemetry
from serve_app.settings_base import settings

# What the text format appends to a metric's name in its samples.
_SUFFIXES = frozenset({"", "_total", "_created", "_bucket", "_sum", "_count", "_info"})
_END = "# EOF\n"


def merge(pages: Iterable[str]) -> str:
    """One page with every metric once and its samples together; of equal labels the first sample counts."""
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
    """The same in OpenMetrics' format.

    Args:
        own: a page that is in this format.
        pages: in the text format.
    """
    return merge((own, *map(as_openmetrics, pages))) + _END


def as_openmetrics(page: str) -> str:
    """A page of the text format in OpenMetrics', but for its end."""
    return "".join(f"{line}\n" for line in _rewritten(page.splitlines()))


def _rewritten(lines: Iterable[str]) -> Iterator[str]:
    help_of: dict[str, str] = {}
    skipped = ""
    for line in lines:
        words = line.split(" ", 3)
        if line.startswith("# HELP ") and len(words) > 2:
            # Written once the type is known, which decides the name.
            help_of[words[2]] = words[3] if len(words) > 3 else ""
        elif line.startswith("# TYPE ") and len(words) > 3:
            name, kind = words[2], words[3]
            # Of a counter or histogram these are samples, in both formats; as a metric the name is taken.
            skipped = name if name.endswith("_created") and kind == "gauge" else ""
            if not skipped:
                yield from _head(name, kind, help_of.get(name))
        elif line.strip() and not line.startswith("#") and not (skipped and line.startswith(skipped)):
            yield line


def _head(name: str, kind: str, text: str | None) -> Iterator[str]:
    """The description of a metric; a counter bears the name that its samples have without `_total`."""
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
    """The metric a sample belongs to: the one just described (x_bucket belongs to x), or one of its own."""
    name = line.partition("{")[0].partition(" ")[0]
    if current is not None and name.removeprefix(current.name) in _SUFFIXES:
        return current
    return families.setdefault(name, _Family(name))


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
