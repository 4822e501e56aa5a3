"""Admin endpoints: `/debug`, the scheduled share, and endpoints of remote pools.

GET   /admin/endpoints: the endpoints of remote pools; POST adds or restores one, DELETE removes one
GET   /admin/mode: each model's scheduled share; POST changes it
GET   /debug/queue, /debug/status, /debug/scaling, /debug/usage, /debug/costs, /debug/tuner
GET   /debug/costs.csv, /debug/usage.csv: the same as `/debug/costs` and `/debug/usage`, as tables
GET   /debug/requests/ID: where the time of a request went, for ten minutes after its end
GET   /debug/capture: the requests of the last ten minutes as a trace without text, as JSON Lines;
      with ?full=true also tenants, outcomes and times, and requests that did not complete
POST  /debug/tuner/freeze, /debug/tuner/thaw
"""

import asyncio
import csv
import io
import logging
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from types import MappingProxyType
from typing import Annotated, Any

import msgspec

from serve_app.core.admission.spending import TokenPrices
from serve_app.errors import Outcome
from serve_app.serving.channel.scheduler_client import SchedulerQueries
from serve_app.serving.gateway.answer.responses import (
    RequestRejected,
    encode,
    send_body,
    send_json,
)
from serve_app.serving.gateway.budgets import tokens_of
from serve_app.serving.gateway.keys import Caller
from serve_app.serving.gateway.request.incoming import IncomingRequest
from serve_app.serving.gateway.request.reader import RequestReader
from serve_app.serving.gateway.router import HttpRoute

ENDPOINTS_PATH = "/admin/endpoints"
_ACTIONS = {"POST": "add", "DELETE": "remove"}

logger = logging.getLogger("ray.serve")


def audit(action: str, caller: Caller, incoming: IncomingRequest, **details: object) -> None:
    """Log a change by an admin: what, by which key, from where."""
    by = "application" if caller.key is None else caller.key.id
    text = "".join(f" {name}={value!r}" for name, value in details.items())
    logger.info("event=audit action=%s by=%s client=%s%s", action, by, incoming.client or "-", text)


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
        for method in ("GET", *_ACTIONS):
            yield HttpRoute(method, ENDPOINTS_PATH, self._serve)

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
        held = await self._reader.body(incoming)
        try:
            change = msgspec.json.decode(held.data, type=EndpointChange)
        except msgspec.DecodeError as exc:
            raise RequestRejected(
                Outcome.REJECTED_INVALID, f'the body must be like {{"url": "http://host:8000"}}: {exc}'
            ) from exc
        finally:
            held.release()
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


# Admin queries to schedulers, which a gateway forwards over the control channel.


# The caller is interactive, and a healthy scheduler answers sooner.
QUERY_TIMEOUT_S = 5.0


async def query_scheduler(model: str, scheduler: SchedulerQueries, query: str, **arguments: Any) -> Any:
    """Query the scheduler of one model.

    Raises:
        RequestRejected: it does not answer.
    """
    try:
        return await asyncio.wait_for(scheduler.query(query, **arguments), QUERY_TIMEOUT_S)
    except Exception as error:
        message = f"the scheduler of {model} does not respond: {error!r}; retry later"
        raise RequestRejected(Outcome.REJECTED_NO_REPLICA, message, retry_after_s=1.0) from error


Query = Callable[[str, SchedulerQueries], Awaitable[Mapping[str, Any]]]
"""A query to a model's scheduler, given the model's name."""


async def query_all(
    queries: Mapping[str, SchedulerQueries],
    query: Query,
) -> list[Mapping[str, Any]]:
    """Query each model's scheduler; a failed query yields the model's name and the error."""
    answers: list[Mapping[str, Any]] = []
    for model, scheduler in queries.items():
        try:
            answers.append(await asyncio.wait_for(query(model, scheduler), QUERY_TIMEOUT_S))
        except Exception as error:  # noqa: BLE001 - whatever keeps one scheduler from answering
            answers.append({"model": model, "error": f"its scheduler does not respond: {error!r}"})
    return answers


# Admin API for the share of requests that is scheduled. Without a model, it applies to all models.
#
#     GET   /admin/mode
#     POST  /admin/mode   {"active_share": 0.1, "model": "m"}


MODE_PATH = "/admin/mode"


class ModeChange(msgspec.Struct, forbid_unknown_fields=True):
    """Body of a request that changes the scheduled share."""

    active_share: Annotated[float, msgspec.Meta(ge=0, le=1)]
    model: str | None = None


class ModeAdmin:
    """The `/admin/mode` API, backed by each model's scheduler."""

    def __init__(self, queries: Mapping[str, SchedulerQueries], reader: RequestReader) -> None:
        self._queries = queries
        self._reader = reader

    def routes(self) -> Iterator[HttpRoute]:
        """Yield the routes of this API."""
        for method in ("GET", "POST"):
            yield HttpRoute(method, MODE_PATH, self._serve)

    async def _serve(self, incoming: IncomingRequest) -> None:
        """Return each model's scheduled share and queue times, after applying a requested change."""
        caller = self._reader.authenticate(incoming)
        caller.check_admin()
        chosen = self._queries
        if incoming.method == "POST":
            chosen = await self._apply_change(incoming, caller)
        models = await query_all(chosen, lambda _model, scheduler: scheduler.query("mode"))
        await send_json(incoming.send, 200, encode({"models": models}), [])

    async def _apply_change(
        self, incoming: IncomingRequest, caller: Caller
    ) -> Mapping[str, SchedulerQueries]:
        held = await self._reader.body(incoming)
        try:
            change = msgspec.json.decode(held.data, type=ModeChange)
        except msgspec.DecodeError as exc:
            message = f'the body must be like {{"active_share": 0.1}}, a share from 0 to 1: {exc}'
            raise RequestRejected(Outcome.REJECTED_INVALID, message) from exc
        finally:
            held.release()
        if change.model is not None and change.model not in self._queries:
            known = ", ".join(self._queries)
            raise RequestRejected(
                Outcome.REJECTED_INVALID,
                f"unknown model {change.model!r}; models: {known}",
                param="model",
            )
        chosen = self._queries if change.model is None else {change.model: self._queries[change.model]}
        for model, scheduler in chosen.items():
            await query_scheduler(model, scheduler, "change_mode", active_share=change.active_share)
            audit("mode_changed", caller, incoming, model=model, active_share=change.active_share)
        return chosen


# The costs of all models as CSV, for spreadsheets and billing.


_COLUMNS = ("pool", "class", "tenant", "engine_seconds", "gpu_seconds", "imposed_delay_seconds")
# Spreadsheets evaluate cells that begin with these; clients may choose the names of tenants.
_FORMULAS = ("=", "+", "-", "@", "\t", "\r")


def cost_table(models: Iterable[Mapping[str, Any]]) -> str:
    """Return a CSV table with one row per pool, class and tenant; seconds have three decimals.

    `since` is the start of the count in UTC, empty for schedulers of older releases. `gpu_seconds` is empty
    for pools without GPUs. Names that a spreadsheet would evaluate get a leading apostrophe.
    """
    text = io.StringIO()
    writer = csv.writer(text)
    writer.writerow(("model", *_COLUMNS, "since"))
    for model in models:
        began = model.get("since")
        since = "" if began is None else datetime.fromtimestamp(began, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
        for row in model.get("rows", ()):
            writer.writerow([_cell(model["model"]), *(_cell(row[name]) for name in _COLUMNS), since])
    return text.getvalue()


_USAGE_COUNTS = ("requests", "prompt_tokens", "cached_tokens", "generated_tokens")
_USAGE_COLUMNS = ("day", "key", "model", *_USAGE_COUNTS, "cost")


def usage_table(rows: Iterable[Mapping[str, Any]]) -> str:
    """Return a CSV table of the usage by day, key and model; `cost` is empty for models without prices."""
    text = io.StringIO()
    writer = csv.writer(text)
    writer.writerow(_USAGE_COLUMNS)
    for row in rows:
        cost = "" if row["cost"] is None else f"{row['cost']:.6f}"
        writer.writerow([*(_cell(row[name]) for name in _USAGE_COLUMNS[:-1]), cost])
    return text.getvalue()


def _cell(value: object) -> str:
    if isinstance(value, float):
        return f"{value:.3f}"
    text = "" if value is None else str(value)
    return f"'{text}" if text.startswith(_FORMULAS) else text


_FROZEN = (
    "the tuner is frozen: the trial is rolled back, adopted values stay in effect, and there are no trials "
    "until POST /debug/tuner/thaw"
)
RECEIPTS_PATH = "/debug/requests/{request_id}"
PROGRAMS_PATH = "/debug/programs/{program}"
_NO_RECEIPT = (
    "no receipt for {request_id!r}: use the x-request-id of the response. Receipts expire ten minutes after "
    "the end of a request, after 20,000 newer ones, or at a restart of the scheduler. Requests that the "
    "gateway rejected (invalid body, key or model, or no connected scheduler) have none: see the log line"
)
_NO_PROGRAM = (
    "no program {name!r}: `ewsjf status` lists the recent ones. A program is forgotten six hours after its "
    "last turn, earlier if there are very many, and at a restart of the scheduler"
)
_JSONL_TYPE = (b"content-type", b"application/jsonl")
_CSV_TYPE = (b"content-type", b"text/csv; charset=utf-8")
_THAWED = "the tuner is thawed: trials are allowed again"


class DebugPages:
    """The `/debug` endpoints, backed by each model's scheduler."""

    def __init__(
        self,
        queries: Mapping[str, SchedulerQueries],
        reader: RequestReader,
        prices: Mapping[str, TokenPrices] = MappingProxyType({}),
    ) -> None:
        self._queries = queries
        self._reader = reader
        self._prices = prices

    def routes(self) -> Iterator[HttpRoute]:
        """Yield the routes of all pages."""
        pages: tuple[tuple[str, str, Query], ...] = (
            ("GET", "/debug/queue", lambda _model, scheduler: scheduler.query("queue")),
            ("GET", "/debug/status", lambda _model, scheduler: scheduler.query("status")),
            ("GET", "/debug/scaling", lambda _model, scheduler: scheduler.query("scaling")),
            ("GET", "/debug/usage", self._usage),
            ("GET", "/debug/costs", lambda _model, scheduler: scheduler.query("costs")),
            ("GET", "/debug/tuner", _tuner),
            ("POST", "/debug/tuner/freeze", partial(_set_frozen, "frozen by an admin")),
            ("POST", "/debug/tuner/thaw", partial(_set_frozen, "")),
        )
        for method, path, query in pages:
            yield HttpRoute(method, path, partial(self._show, query))
        yield HttpRoute("GET", "/debug/capture", self._capture)
        yield HttpRoute("GET", "/debug/costs.csv", self._cost_table)
        yield HttpRoute("GET", "/debug/usage.csv", self._usage_table)
        yield HttpRoute("GET", RECEIPTS_PATH, self._receipt)
        yield HttpRoute("GET", PROGRAMS_PATH, self._program)

    async def _receipt(self, incoming: IncomingRequest, request_id: str) -> None:
        """Return the receipt of a request of any model.

        Raises:
            RequestRejected: the caller is not an admin, or no scheduler has the request.
        """
        self._reader.authenticate(incoming).check_admin()
        found_by = await query_all(
            self._queries, lambda _, scheduler: scheduler.query("receipt", request_id=request_id)
        )
        receipts = [found for found in found_by if "request_id" in found]
        if not receipts:
            message = _NO_RECEIPT.format(request_id=request_id)
            raise RequestRejected(Outcome.REJECTED_INVALID, message, code="not_found", status=404)
        # A request to a route may have been rejected by one model before another one served it.
        found = max(receipts, key=lambda receipt: receipt.get("outcome") in (None, Outcome.COMPLETED))
        await send_json(incoming.send, 200, encode(found), [])

    async def _program(self, incoming: IncomingRequest, name: str) -> None:
        """Return where the time of a program went, for each tenant and model that has one with this id.

        Raises:
            RequestRejected: the caller is not an admin, or no scheduler has the program.
        """
        self._reader.authenticate(incoming).check_admin()
        models = await self._complete(lambda _model, scheduler: scheduler.query("program", program=name))
        found = [each for model in models for each in model.get("programs", ())]
        if not found:
            message = _NO_PROGRAM.format(name=name)
            raise RequestRejected(Outcome.REJECTED_INVALID, message, code="not_found", status=404)
        await send_json(incoming.send, 200, encode({"programs": found}), [])

    async def _capture(self, incoming: IncomingRequest) -> None:
        self._reader.authenticate(incoming).check_admin()
        lines = b""
        # Without the argument, schedulers of older releases understand the query.
        chosen = {"full": True} if incoming.query().get("full") == ["true"] else {}
        for model, scheduler in self._queries.items():
            for line in await query_scheduler(model, scheduler, "capture", **chosen):
                lines += encode({**line, "model": model}) + b"\n"
        await send_body(incoming.send, 200, [_JSONL_TYPE], lines)

    async def _cost_table(self, incoming: IncomingRequest) -> None:
        self._reader.authenticate(incoming).check_admin()
        models = await self._complete(lambda _model, scheduler: scheduler.query("costs"))
        await send_body(incoming.send, 200, [_CSV_TYPE], cost_table(models).encode())

    async def _complete(self, query: Query) -> list[Mapping[str, Any]]:
        """Query all schedulers; raise if one fails, because a table without its rows would look complete."""
        models = await query_all(self._queries, query)
        if errors := [f"{model['model']}: {model['error']}" for model in models if "error" in model]:
            message = "; ".join(errors)
            raise RequestRejected(Outcome.FAILED, message, code="scheduler_unavailable", status=503)
        return models

    async def _usage_table(self, incoming: IncomingRequest) -> None:
        self._reader.authenticate(incoming).check_admin()
        models = await self._complete(self._usage)
        rows = [row for model in models for row in model["rows"]]
        await send_body(incoming.send, 200, [_CSV_TYPE], usage_table(rows).encode())

    async def _usage(self, _model: str, scheduler: SchedulerQueries) -> Mapping[str, Any]:
        """Return the usage of each key by day, with its cost where the model has prices."""
        usage: Mapping[str, Any] = await scheduler.query("usage")
        rows = [{**row, "cost": self._cost(row)} for row in usage.get("rows", ())]
        return {**usage, "rows": rows}

    def _cost(self, row: Mapping[str, Any]) -> float | None:
        price = self._prices.get(row["model"])
        return None if price is None else price.of(tokens_of([row[name] for name in _USAGE_COUNTS]))

    async def _show(self, query: Query, incoming: IncomingRequest) -> None:
        caller = self._reader.authenticate(incoming)
        caller.check_admin()
        models = await query_all(self._queries, query)
        if incoming.method == "POST":
            audit(incoming.path.removeprefix("/debug/").replace("/", "_"), caller, incoming)
        await send_json(incoming.send, 200, encode({"models": models}), [])


async def _tuner(model: str, scheduler: SchedulerQueries) -> Mapping[str, Any]:
    """Return the part of the status that describes the tuner."""
    status = await scheduler.query("status")
    return {"model": model, **status["tuner"]}


async def _set_frozen(reason: str, model: str, scheduler: SchedulerQueries) -> Mapping[str, Any]:
    """Freeze the tuner with a reason, or thaw it with an empty one, and describe the effect."""
    await scheduler.query("freeze", reason=reason)
    return {"model": model, "frozen": reason, "message": _FROZEN if reason else _THAWED}
