"""Admin API of remote pools: lists, adds, restores and removes their endpoints.

GET     /admin/endpoints
POST    /admin/endpoints   {"url": "http://host:8000", "model": "m", "pool": "p"}
DELETE  /admin/endpoints
"""

import asyncio
from collections.abc import Awaitable, Callable, Iterator, Mapping
from dataclasses import dataclass

import msgspec

from serve_app.errors import Outcome
from serve_app.serving.gateway.answer.responses import RequestRejected, encode, send_json
from serve_app.serving.gateway.audit import audit
from serve_app.serving.gateway.keys import Caller
from serve_app.serving.gateway.request.incoming import IncomingRequest
from serve_app.serving.gateway.request.reader import RequestReader
from serve_app.serving.gateway.router import HttpRoute

ENDPOINTS_PATH = "/admin/endpoints"
_ACTIONS = {"POST": "add", "DELETE": "remove"}

# The caller is interactive; a watcher that takes longer is being replaced.
_WATCHER_TIMEOUT_S = 5.0


class EndpointChange(msgspec.Struct, forbid_unknown_fields=True):
    """Body of a request that adds or removes an endpoint."""

    url: str
    model: str | None = None
    pool: str | None = None


@dataclass(frozen=True, slots=True)
class PoolWatcher:
    """Access to the watcher of one pool.

    Attributes:
        describe: returns a description of each endpoint.
        change: performs `add` or `remove` for a URL; the result has `error` if that was rejected.
    """

    describe: Callable[[], Awaitable[list[dict[str, object]]]]
    change: Callable[[str, str], Awaitable[dict[str, object]]]


class EndpointAdmin:
    """The `/admin/endpoints` API, over watchers by model and pool."""

    def __init__(self, watchers: Mapping[tuple[str, str], PoolWatcher], reader: RequestReader) -> None:
        self._watchers = watchers
        self._reader = reader

    def routes(self) -> Iterator[HttpRoute]:
        """Yield the routes of this API."""
        listed = "endpoints of pools with external engines; for admins"
        yield HttpRoute("GET", ENDPOINTS_PATH, self._serve, listed)
        added = "add an endpoint, or restore a removed one; for admins"
        yield HttpRoute("POST", ENDPOINTS_PATH, self._serve, added)
        yield HttpRoute("DELETE", ENDPOINTS_PATH, self._serve, "remove an endpoint; for admins")

    async def _serve(self, incoming: IncomingRequest) -> None:
        """List, add, restore or remove endpoints. A removed endpoint completes its running requests."""
        caller = self._reader.authenticate(incoming)
        caller.check_admin()
        action = _ACTIONS.get(incoming.method)
        await (self._show(incoming) if action is None else self._change(action, incoming, caller))

    async def _show(self, incoming: IncomingRequest) -> None:
        endpoints: list[dict[str, object]] = []
        for (model, pool), watcher in self._watchers.items():
            try:
                found = await asyncio.wait_for(watcher.describe(), _WATCHER_TIMEOUT_S)
            except Exception as error:  # noqa: BLE001 - whatever keeps one watcher from answering
                found = [{"pool": pool, "error": f"its watcher does not respond: {error!r}"}]
            endpoints += [{"model": model, **endpoint} for endpoint in found]
        await send_json(incoming.send, 200, encode({"endpoints": endpoints}), [])

    async def _change(self, action: str, incoming: IncomingRequest, caller: Caller) -> None:
        change = await self._reader.document(incoming, EndpointChange, '{"url": "http://host:8000"}')
        model, pool = self._select_pool(change)
        try:
            answer = await asyncio.wait_for(
                self._watchers[model, pool].change(action, change.url), _WATCHER_TIMEOUT_S
            )
        except Exception as exc:
            message = f"the watcher of pool {pool} does not respond: {exc!r}; retry later"
            raise RequestRejected(Outcome.REJECTED_NO_REPLICA, message, retry_after_s=1.0) from exc
        if "error" in answer:
            raise RequestRejected(Outcome.REJECTED_INVALID, str(answer["error"]), param="url")
        audit(f"endpoint_{action}", caller, incoming, model=model, pool=pool, url=change.url)
        await send_json(incoming.send, 200, encode({"model": model, "pool": pool, **answer}), [])

    def _select_pool(self, change: EndpointChange) -> tuple[str, str]:
        matches = [
            (model, pool)
            for model, pool in self._watchers
            if change.model in (None, model) and change.pool in (None, pool)
        ]
        if len(matches) == 1:
            return matches[0]
        known = ", ".join(f"{model}/{pool}" for model, pool in self._watchers) or "none"
        given = (("model", change.model), ("pool", change.pool))
        if matches:
            problem = "several remote pools match: specify model and pool"
        else:
            wanted = " and ".join(f"{name} {value!r}" for name, value in given if value is not None)
            problem = f"no remote pool matches {wanted or 'the request'}"
        raise RequestRejected(Outcome.REJECTED_INVALID, f"{problem}; remote pools: {known}", param="pool")
