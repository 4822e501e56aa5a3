"""`/metrics` of all gateways and schedulers, and `/metrics/engines` of the engines behind them.

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
import contextvars
import hashlib
import hmac
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import parse_qs

from serve_app.core.settings_base import settings
from serve_app.errors import Outcome
from serve_app.serving.cached_page import CachedPage
from serve_app.serving.channel.scheduler_client import ReplicaAddress, SchedulerClient
from serve_app.serving.gateway.answer.responses import (
    ForbiddenError,
    RequestRefused,
    encode,
    send_body,
    send_json,
)
from serve_app.serving.gateway.keys import Caller, Secret
from serve_app.serving.gateway.request.headers import engine_head
from serve_app.serving.gateway.request.incoming import IncomingRequest
from serve_app.serving.gateway.telemetry import Telemetry
from serve_app.serving.gateway.upstream import UpstreamError, UpstreamPool

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


# `/metrics/engines`: the engines' own metrics, for a Prometheus that cannot reach their ports.
#
# A replica's port asks for a token that only gateways are given, and lives as long as the replica. So the
# gateway lists its replicas as targets of Prometheus' HTTP service discovery, each at this very path, and
# passes a replica's page on as it is. Prometheus adds the labels of a target by itself: no page is parsed,
# written anew or joined with others, whose sum would be megabytes at 200 replicas.


ENGINES_PATH = "/metrics/engines"
_CONTENT_TYPE = b"content-type"
# Shorter than any interval between scrapes: several scrapers cost an engine as much as one.
_KEPT_S = 1.0
_TIMEOUT_S = 5.0


@dataclass(frozen=True, slots=True)
class _Page:
    content_type: bytes
    text: bytes


class EnginePages:
    """The list of engines, and the page of each.

    Args:
        schedulers: by model name.
        check: refuses whoever may not read metrics, by the headers of a request.
    """

    def __init__(
        self,
        upstream: UpstreamPool,
        schedulers: Mapping[str, SchedulerClient],
        check: Callable[[Mapping[bytes, bytes]], None],
    ) -> None:
        self._upstream = upstream
        # A scheduler stands once under each of its model's names, the model's own first.
        self._models = {id(scheduler): model for model, scheduler in reversed([*schedulers.items()])}
        self._schedulers = {id(scheduler): scheduler for scheduler in schedulers.values()}
        self._check = check
        self._pages: dict[str, asyncio.Task[_Page | RequestRefused]] = {}

    async def serve(self, incoming: IncomingRequest) -> None:
        """Answer with the targets, or with the page of the replica that `?replica=` names.

        Raises:
            RequestRefused: the caller may not read metrics, there is no such replica, or it does not answer.
        """
        self._check(incoming.headers)
        asked = parse_qs(incoming.scope["query_string"].decode("latin-1")).get("replica")
        if asked is None:
            # Where the scraper has found us, it finds us again.
            host = incoming.headers.get(b"host", b"").decode("latin-1")
            await send_json(incoming.send, 200, encode([*self._targets(host)]), [])
            return
        page = await self._page(asked[0])
        await send_body(incoming.send, 200, [(_CONTENT_TYPE, page.content_type)], page.text)

    def _targets(self, host: str) -> Iterator[dict[str, Any]]:
        for model, replica in self._replicas():
            labels = {"model": model, "pool": replica.pool, "replica": replica.replica_id}
            place = {"__metrics_path__": ENGINES_PATH, "__param_replica": replica.replica_id}
            yield {"targets": [host], "labels": {**labels, **place}}

    def _replicas(self) -> Iterator[tuple[str, ReplicaAddress]]:
        for key, scheduler in self._schedulers.items():
            for replica in scheduler.replicas():
                yield self._models[key], replica

    async def _page(self, replica_id: str) -> _Page:
        """The page of a replica, fetched a moment ago; those who ask meanwhile wait for the same one."""
        fetching = self._pages.get(replica_id)
        if fetching is None:
            address = next((one for _, one in self._replicas() if one.replica_id == replica_id), None)
            if address is None:
                message = f"there is no replica {replica_id[:200]}: ask {ENGINES_PATH} again"
                raise RequestRefused(Outcome.REJECTED_INVALID, message, code="not_found", status=404)
            loop = asyncio.get_running_loop()
            # In an empty context: Ray Serve cancels what a request has started with the request.
            fetching = loop.create_task(self._fetched(address), context=contextvars.Context())
            fetching.add_done_callback(
                lambda _: loop.call_later(_KEPT_S, self._pages.pop, replica_id, None),
            )
            self._pages[replica_id] = fetching
        found = await asyncio.shield(fetching)
        if isinstance(found, RequestRefused):
            # A new one for each: an exception that is raised keeps where it was raised.
            raise RequestRefused(found.outcome, found.message, status=found.status)
        return found

    async def _fetched(self, address: ReplicaAddress) -> _Page | RequestRefused:
        try:
            async with asyncio.timeout(_TIMEOUT_S):
                response = await self._upstream.send(address.server, engine_head(address, "/metrics"), b"")
                try:
                    text = await response.read()
                finally:
                    response.close()
        except (UpstreamError, TimeoutError) as error:
            reason = f"replica {address.replica_id} gave no metrics: {error or 'it took too long'}"
            return RequestRefused(Outcome.FAILED, reason, status=502)
        if response.status != 200:
            reason = f"replica {address.replica_id} answered {response.status} to a scrape"
            return RequestRefused(Outcome.FAILED, reason, status=502)
        return _Page(response.header(_CONTENT_TYPE), text)
