"""The watcher of one pool: follows its sources, and watches each endpoint that they find.

- `EndpointWatcher`: watches all endpoints of a pool; `EndpointsDeployment` runs it in a small process.
- `EndpointChoices`: endpoints that admins add and remove at run time, which is persisted (`ChoicesStore`).
"""

import asyncio
import contextlib
import contextvars
import logging
import math
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from msgspec import Struct
from ray import serve
from ray.serve.handle import DeploymentHandle

from serve_app.core.routing.snapshot import decoded
from serve_app.errors import EngineError, SettingsError
from serve_app.serving._ray import read_record, write_record
from serve_app.serving.channel.connector import Locate
from serve_app.serving.channel.messages import Role, SchedulerEndpoint
from serve_app.serving.channel.settings import ChannelSettings
from serve_app.serving.deployments import ALL_AT_ONCE_PERCENT, locator
from serve_app.serving.gateway.upstream import UpstreamPool, UpstreamSettings
from serve_app.serving.remote.endpoint import Endpoint, EndpointContext
from serve_app.serving.remote.settings import RemoteSettings
from serve_app.serving.remote.sources import EndpointUrl, FixedSource, SourceHealth, source_of
from serve_app.serving.state import StateError, StateStore, StoreCalls
from serve_app.serving.watchdog import start_watchdog

logger = logging.getLogger("ray.serve")

# Interval of attempts to read the stored choices while the store does not answer.
_RETRY_S = 10.0


class _Choices(Struct):
    """Stored choices: URLs."""

    added: set[str]
    removed: set[str]

    def __post_init__(self) -> None:
        for url in self.added:
            EndpointUrl.parse(url)


class EndpointChoices:
    """Endpoints that were added or removed by admins.

    While the store cannot be read, nothing is overwritten. Choices made in that time are merged with the
    stored ones later, and take precedence. Stored choices that are invalid are renamed and not used.

    Attributes:
        added: URLs in addition to the discovered ones.
        removed: discovered URLs that receive no requests.
    """

    def __init__(self, store: StateStore) -> None:
        self._store, self._calls = store, StoreCalls(store)
        self._restored = False
        # URLs that were changed before the stored choices were read.
        self._chosen: set[str] = set()
        self._retry: asyncio.Task[None] | None = None
        self.added: set[str] = set()
        self.removed: set[str] = set()

    def __repr__(self) -> str:
        return f"<EndpointChoices added={len(self.added)} removed={len(self.removed)} {self._store}>"

    async def load(self) -> None:
        """Read the stored choices; while the store does not answer, the watcher works without them."""
        try:
            await self._restore()
        except StateError as exc:
            logger.warning("event=endpoints_not_restored reason=%r", str(exc))
            loop = asyncio.get_running_loop()
            self._retry = loop.create_task(self._try_again(), context=contextvars.Context())

    def close(self) -> None:
        """Stop retrying to read."""
        if self._retry is not None:
            self._retry.cancel()

    def add(self, url: str, *, found: bool) -> None:
        """Add an endpoint; `found` if it is discovered, so that it only needs to be restored."""
        self._note(url)
        self.removed.discard(url)
        if not found:
            self.added.add(url)

    def remove(self, url: str, *, found: bool) -> None:
        """Remove an endpoint; `found` if it is discovered, so that the removal must be stored."""
        self._note(url)
        self.added.discard(url)
        if found:
            self.removed.add(url)

    async def save(self) -> bool:
        """Write the choices, and return whether they survive a restart of the application."""
        store, document = self._store, {"added": sorted(self.added), "removed": sorted(self.removed)}
        if not self._restored:
            logger.warning("event=endpoints_not_saved reason=%r", f"{store.path} has not been loaded yet")
            return False
        try:
            await self._calls.save(document)
        except StateError as exc:
            logger.warning("event=endpoints_not_saved reason=%r", str(exc))
            return False
        return store.outlives_cluster

    def _note(self, url: str) -> None:
        if not self._restored:
            self._chosen.add(url)

    async def _restore(self) -> None:
        document = await self._calls.load()
        self._restored = True
        if document is None:
            return
        try:
            stored = decoded(document, _Choices)
        except ValueError as exc:
            self._calls.reject(str(exc))
        else:
            self.added |= stored.added - self._chosen
            self.removed |= stored.removed - self._chosen

    async def _try_again(self) -> None:
        while not self._restored:
            await asyncio.sleep(_RETRY_S)
            with contextlib.suppress(StateError):
                await self._restore()
        logger.info("event=endpoints_restored added=%d removed=%d", len(self.added), len(self.removed))
        await self.save()


_START_POLL_S = 0.05
# Interval of looks at the states, and of showing unchanged ones, for a new scheduler.
_LOOK_S, _SHOW_AGAIN_S = 1.0, 10.0
_SHOW_TIMEOUT_S = 10.0

Show = Callable[[Mapping[str, Any]], Awaitable[object]]


class EndpointWatcher:
    """Watcher of one pool's endpoints.

    Args:
        show: sends `states` to the scheduler, for operators.
    """

    def __init__(
        self,
        pool: str,
        settings: RemoteSettings,
        channel: ChannelSettings,
        locate: Locate,
        choices: EndpointChoices,
        show: Show,
    ) -> None:
        self._settings = settings
        self._sources = [source_of(text) for text in settings.endpoints]
        self._health = [SourceHealth(text) for text in settings.endpoints]
        self._found: list[frozenset[EndpointUrl]] = [frozenset() for _ in self._sources]
        self._choices = choices
        self._endpoints: dict[EndpointUrl, Endpoint] = {}
        upstream = UpstreamPool(UpstreamSettings(connect_timeout_s=settings.metrics_timeout_s))
        self._context = EndpointContext(
            pool=pool,
            settings=settings,
            api_key=settings.key(),
            upstream=upstream,
            locate=_with_one_search(locate),
            channel=channel,
        )
        self._show = show
        self._following: list[asyncio.Task[None]] = []
        self._closing: set[asyncio.Task[None]] = set()

    def __repr__(self) -> str:
        return f"<EndpointWatcher {self._context.pool} {self._serving} of {len(self._endpoints)} serve>"

    @property
    def _serving(self) -> int:
        return sum(not endpoint.failure for endpoint in self._endpoints.values())

    async def start(self) -> None:
        """Start watching; if all endpoints are configured as URLs, wait until one of them answers.

        Raises:
            EngineError: none can be used in time; the message has the reasons.
        """
        await self._choices.load()
        for index, text in enumerate(self._settings.endpoints):
            self._following.append(asyncio.create_task(self._follow(index), name=f"follow {text}"))
        await asyncio.sleep(0)
        self._reconcile()
        self._following.append(asyncio.create_task(self._show_states(), name="show the states"))
        if self._sources and all(isinstance(source, FixedSource) for source in self._sources):
            try:
                await self._wait_for_one()
            except BaseException:
                await self.close()
                raise

    async def close(self) -> None:
        """Remove all endpoints from the scheduler; running requests continue."""
        self._choices.close()
        for task in self._following:
            task.cancel()
        if self._following:
            await asyncio.wait(self._following)
        for url in tuple(self._endpoints):
            self._drop(url)
        while self._closing:
            await asyncio.wait(self._closing)
        self._context.upstream.close()

    def check_health(self) -> None:
        """Raise if a source is no longer followed, or states no longer shown: an internal error."""
        for task in self._following:
            if task.done() and (fault := task.exception()) is not None:
                raise EngineError(f"{task.get_name()} has ended") from fault

    def describe(self) -> list[dict[str, object]]:
        """Return a description of each endpoint, including removed ones."""
        chosen = [self._endpoints[url].describe() for url in sorted(self._endpoints)]
        for one in chosen:
            one["added"] = one["url"] in self._choices.added
        taken: list[dict[str, object]] = [
            {"url": url, "pool": self._context.pool, "state": "removed", "reason": "removed by an admin"}
            for url in sorted(self._choices.removed)
        ]
        return [*chosen, *taken]

    def states(self) -> dict[str, Any]:
        """Return the number of wanted endpoints, those that are down or asleep, and sources that fail."""
        closed = [each for _, each in sorted(self._endpoints.items()) if each.failure]
        down = [each.describe() for each in closed if not each.is_asleep]
        unread = [{"source": each.source, "reason": each.failure} for each in self._health if each.failure]
        return {
            "pool": self._context.pool,
            "endpoints": len(self._endpoints),
            "down": down,
            "asleep": [str(each.url) for each in closed if each.is_asleep],
            "unread_sources": unread,
        }

    async def change(self, action: str, text: str) -> dict[str, object]:
        """Add an endpoint or restore a removed one, or remove one, whose running requests continue.

        An invalid URL, or one without an endpoint to remove, is returned as `error`.
        """
        try:
            url = self._url(text, is_known=action != "add")
        except (ValueError, SettingsError) as exc:
            return {"error": str(exc)}
        choose = self._choices.add if action == "add" else self._choices.remove
        choose(url, found=any(str(one) == url for found in self._found for one in found))
        self._reconcile()
        return {"url": url, "persisted": await self._choices.save()}

    def _url(self, text: str, *, is_known: bool) -> str:
        """Return a URL in its usual form.

        Raises:
            ValueError: it is not a URL.
            SettingsError: it must be known, and there is no such endpoint.
        """
        url = str(EndpointUrl.parse(text))
        if is_known and url not in map(str, self._endpoints):
            raise SettingsError(
                f"pool {self._context.pool} has no endpoint {url}: GET /admin/endpoints lists them"
            )
        return url

    async def _follow(self, index: int) -> None:
        def publish(urls: frozenset[EndpointUrl]) -> None:
            self._found[index] = urls
            self._reconcile()

        await self._sources[index].follow(publish, self._settings.refresh_s, self._health[index])

    async def _show_states(self) -> None:
        """Show the states when they change, and periodically."""
        loop, shown, shown_at = asyncio.get_running_loop(), None, -math.inf
        while True:
            await asyncio.sleep(_LOOK_S)
            states, now = self.states(), loop.time()
            if states == shown and now - shown_at < _SHOW_AGAIN_S:
                continue
            # A scheduler that is being replaced does not answer; the next look tries again.
            with contextlib.suppress(Exception):
                async with asyncio.timeout(_SHOW_TIMEOUT_S):
                    await self._show(states)
                shown, shown_at = states, now

    def _reconcile(self) -> None:
        """Start and stop watches to match the wanted endpoints."""
        wanted = {url for found in self._found for url in found}
        known = {str(url) for url in wanted}
        wanted |= {EndpointUrl.parse(text) for text in self._choices.added if text not in known}
        wanted = {url for url in wanted if str(url) not in self._choices.removed}
        # Two sources may find one server, by its name and by its address. It is one replica.
        servers: dict[tuple[str, str], EndpointUrl] = {}
        for url in sorted(wanted, key=lambda url: (url not in self._endpoints, url)):
            servers.setdefault((url.authority, url.path), url)
        wanted = set(servers.values())
        for url in self._endpoints.keys() - wanted:
            logger.info("event=endpoint_removed pool=%s endpoint=%s", self._context.pool, url)
            self._drop(url)
        for url in sorted(wanted - self._endpoints.keys()):
            logger.info("event=endpoint_found pool=%s endpoint=%s", self._context.pool, url)
            endpoint = self._endpoints[url] = Endpoint(url, self._context)
            endpoint.start()

    def _drop(self, url: EndpointUrl) -> None:
        task = asyncio.create_task(self._endpoints.pop(url).close())
        self._closing.add(task)
        task.add_done_callback(self._closing.discard)

    async def _wait_for_one(self) -> None:
        loop = asyncio.get_running_loop()
        deadline = loop.time() + self._settings.start_timeout_s
        while not any(endpoint.is_identified for endpoint in self._endpoints.values()):
            asked = self._endpoints.values()
            rejected = bool(asked) and all(endpoint.is_rejected for endpoint in asked)
            if rejected or loop.time() > deadline:
                reasons = "; ".join(dict.fromkeys(endpoint.failure for endpoint in asked))
                raise EngineError(f"no endpoint can be used: {reasons}")
            await asyncio.sleep(_START_POLL_S)


def _with_one_search(locate: Locate) -> Locate:
    """Share one search among all callers, as some hundred connections may lose the scheduler at once."""
    searching: asyncio.Future[SchedulerEndpoint] | None = None

    async def located() -> SchedulerEndpoint:
        nonlocal searching
        if searching is None or searching.done():
            searching = asyncio.ensure_future(locate())
        # A caller that gives up must not cancel the search of the others.
        return await asyncio.shield(searching)

    return located


# One replica, because two would register the same endpoint. Until a dead one is replaced, gateways finish
# running requests, and new ones wait. A changed one stops once its successor has found an endpoint that can
# be used; for the moments in between, the scheduler keeps the latest registration of each endpoint.
WATCHER_DEPLOYMENT_OPTIONS: dict[str, Any] = {
    "num_replicas": 1,
    "max_surge_percent": ALL_AT_ONCE_PERCENT,
    "health_check_period_s": 1.0,
    "graceful_shutdown_wait_loop_s": 0.1,
    "graceful_shutdown_timeout_s": 10.0,
}


class ChoicesStore(StateStore):
    """Store of a pool's `EndpointChoices`, which a new watcher loads after a deployment.

    A copy is in Ray's control service. It outlives the watcher, but only a `state_uri` outlives the cluster.
    """

    def __init__(self, state_uri: str | None, name: str) -> None:
        super().__init__(state_uri or "ray:", "endpoints", name)
        self.outlives_cluster = state_uri is not None
        self._record = f"endpoints/{name}"

    def _read(self) -> bytes | None:
        stored = super()._read() if self.outlives_cluster else None
        if stored is None and (stored := read_record(self._record)) is not None:
            # The deployment may have added the `state_uri`.
            self._write(stored)
        return stored

    def _write(self, data: bytes) -> None:
        write_record(self._record, data)
        if self.outlives_cluster:
            super()._write(data)


class EndpointsDeployment:
    """Serve deployment that runs one `EndpointWatcher`."""

    async def __init__(  # type: ignore[misc]  # Serve awaits it, which mypy cannot know
        self,
        scope: str,
        pool: str,
        settings: RemoteSettings,
        channel: ChannelSettings,
        scheduler: DeploymentHandle[Any],
        state_uri: str | None,
    ) -> None:
        application = serve.get_replica_context().app_name
        self._watcher = EndpointWatcher(
            pool,
            settings,
            channel,
            locator(scheduler, Role.REPLICA),
            EndpointChoices(ChoicesStore(state_uri, f"{application}/{scope}")),
            scheduler.show_endpoints.remote,
        )
        await self._watcher.start()
        self._watchdog = start_watchdog()

    async def check_health(self) -> None:
        """Raise if the watcher must be replaced."""
        self._watcher.check_health()

    async def described(self) -> list[dict[str, object]]:
        """Return a description of each endpoint."""
        return self._watcher.describe()

    async def change(self, action: str, url: str) -> dict[str, object]:
        """See `EndpointWatcher.change`."""
        return await self._watcher.change(action, url)

    async def __del__(self) -> None:
        # Serve awaits this once before it ends the process; Python would not await it.
        if hasattr(self, "_watcher"):
            await self._watcher.close()
