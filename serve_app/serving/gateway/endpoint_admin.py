"""The admin API for pools of endpoints: who is there, add one, take one away.

    GET    /admin/endpoints
    POST   /admin/endpoints   {"url": "http://10.0.0.7:8000", "model": "m", "pool": "short"}
    DELETE /admin/endpoints   the same

Model and pool may be left out where only one is possible.
"""

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass

import msgspec

from serve_app.errors import Outcome
from serve_app.serving.gateway.answer.responses import RequestRefused, encode, send_json
from serve_app.serving.gateway.request.incoming import IncomingRequest
from serve_app.serving.gateway.request.reader import RequestReader

ENDPOINTS_PATH = "/admin/endpoints"
ENDPOINTS_METHODS = ("GET", "POST", "DELETE")
_ACTIONS = {"POST": "add", "DELETE": "remove"}

# An admin waits; a watcher that takes longer is being replaced.
_TIMEOUT_S = 5.0


class EndpointChange(msgspec.Struct, forbid_unknown_fields=True):
    """The body of a change."""

    url: str
    model: str | None = None
    pool: str | None = None


@dataclass(frozen=True, slots=True)
class PoolWatcher:
    """How to talk to the watcher of one pool.

    Attributes:
        described: what each endpoint is and does.
        change: `add` or `remove` a URL; an answer with `error` refuses.
    """

    described: Callable[[], Awaitable[list[dict[str, object]]]]
    change: Callable[[str, str], Awaitable[dict[str, object]]]


class EndpointAdmin:
    """Serves the admin API.

    Args:
        watchers: by model and pool.
    """

    def __init__(self, watchers: Mapping[tuple[str, str], PoolWatcher], reader: RequestReader) -> None:
        self._watchers = watchers
        self._reader = reader

    async def serve(self, incoming: IncomingRequest) -> None:
        """Show all endpoints, add one or give it back, or take one away: what runs there goes on."""
        self._reader.authenticate(incoming).check_admin()
        action = _ACTIONS.get(incoming.scope["method"])
        await (self._show(incoming) if action is None else self._change(action, incoming))

    async def _show(self, incoming: IncomingRequest) -> None:
        endpoints: list[dict[str, object]] = []
        for (model, pool), watcher in self._watchers.items():
            try:
                found = await asyncio.wait_for(watcher.described(), _TIMEOUT_S)
            except Exception as error:  # noqa: BLE001 - whatever keeps one watcher from answering
                found = [{"pool": pool, "error": f"its watcher does not answer: {error!r}"}]
            endpoints += [{"model": model, **one} for one in found]
        await send_json(incoming.send, 200, encode({"endpoints": endpoints}), [])

    async def _change(self, action: str, incoming: IncomingRequest) -> None:
        held = await self._reader.body(incoming)
        try:
            asked = msgspec.json.decode(held.data, type=EndpointChange)
        except msgspec.DecodeError as exc:
            raise RequestRefused(
                Outcome.REJECTED_INVALID, f'the body must be like {{"url": "http://host:8000"}}: {exc}'
            ) from exc
        finally:
            held.release()
        model, pool = self._chosen(asked)
        try:
            answer = await asyncio.wait_for(self._watchers[model, pool].change(action, asked.url), _TIMEOUT_S)
        except Exception as exc:
            message = f"the watcher of pool {pool} does not answer: {exc!r}; try again"
            raise RequestRefused(Outcome.REJECTED_NO_REPLICA, message, retry_after_s=1.0) from exc
        if "error" in answer:
            raise RequestRefused(Outcome.REJECTED_INVALID, str(answer["error"]), param="url")
        await send_json(incoming.send, 200, encode({"model": model, "pool": pool, **answer}), [])

    def _chosen(self, asked: EndpointChange) -> tuple[str, str]:
        fitting = [
            (model, pool)
            for model, pool in self._watchers
            if asked.model in (None, model) and asked.pool in (None, pool)
        ]
        if len(fitting) == 1:
            return fitting[0]
        there = ", ".join(f"{pool} of {model}" for model, pool in self._watchers) or "none"
        what = "several pools fit: give model and pool" if fitting else "no such pool of endpoints"
        raise RequestRefused(Outcome.REJECTED_INVALID, f"{what}; there are: {there}", param="pool")
