"""Pages and endpoints of admins. Their queries reach schedulers over the control channel (`query_scheduler`).

`audit` logs one line for each change by an admin. `cost_table` and `usage_table` are CSV, for spreadsheets
and billing.

`KeyAdmin`: the keys in `gateway.keys_file`. Secrets are returned once, at their creation.

GET     /admin/keys      all keys with their status and what they have used today and this month
POST    /admin/keys      creates a key, and returns it with its secret
POST    /admin/keys/ID   changes limits and permissions of a key
DELETE  /admin/keys/ID   revokes a key

All gateways, and `ewsjf keys`, use the same file. Gateways notice a change within seconds.

`EndpointAdmin`: lists, adds, restores and removes endpoints of remote pools.

GET     /admin/endpoints
POST    /admin/endpoints   {"url": "http://host:8000", "model": "m", "pool": "p"}
DELETE  /admin/endpoints

`ModeAdmin`: the share of requests that is scheduled. Without a model, it applies to all models.

GET   /admin/mode
POST  /admin/mode   {"active_share": 0.1, "model": "m"}

`DebugPages`: endpoints under `/debug`.

GET   /debug/queue, /debug/status, /debug/scaling, /debug/usage, /debug/costs, /debug/tuner
GET   /debug/costs.csv, /debug/usage.csv: the same as `/debug/costs` and `/debug/usage`, as tables
GET   /debug/requests/ID: where the time of a request went, for ten minutes after its end
GET   /debug/programs/ID: where the time of an agent program went, for six hours after its last turn
GET   /debug/capture: the requests of the last ten minutes as a trace without text, as JSON Lines;
      with ?full=true also tenants, outcomes and times, and requests that did not complete
POST  /debug/tuner/freeze, /debug/tuner/thaw

`EnginePages`: `/metrics/engines`, the engines' own metrics, for a Prometheus that cannot reach their ports.

A replica's port requires a token that only gateways have. The gateway therefore lists its replicas as
targets of Prometheus' HTTP service discovery, each at this path, and passes a replica's page on unchanged.
Prometheus adds the labels of a target. Pages are not merged, which would take megabytes at 200 replicas.
"""

import asyncio
import contextvars
import csv
import io
import logging
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from itertools import chain
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Any, TypeVar

import msgspec

from serve_app.core.admission.key_limits import TokenPrices
from serve_app.errors import Outcome
from serve_app.serving.api_keys import (
    KeyRecord,
    KeysFileError,
    UnknownKeyError,
    change_key,
    create_key,
    read_keys,
    revoke_key,
)
from serve_app.serving.channel.scheduler_client import ReplicaAddress, SchedulerClient, SchedulerQueries
from serve_app.serving.gateway.answer.responses import RequestRejected, encode
from serve_app.serving.gateway.keys import LOGIN_PREFIX, PERIODS, Budgets, Caller, tokens_of
from serve_app.serving.gateway.path import Request
from serve_app.serving.gateway.request.fields import engine_head
from serve_app.serving.gateway.request.reader import RequestReader
from serve_app.serving.gateway.router import HttpRoute
from serve_app.serving.gateway.upstream import UpstreamError, UpstreamPool

logger = logging.getLogger("ray.serve")


def audit(action: str, caller: Caller, request: Request, **details: object) -> None:
    """Log a change by an admin: what, by which key or user, from where."""
    by = "application" if caller.key is None else caller.key.id
    if caller.key is not None and by.startswith(LOGIN_PREFIX):
        details = {"user": caller.key.name, **details}
    text = "".join(f" {name}={value!r}" for name, value in details.items())
    logger.info("event=audit action=%s by=%s client=%s%s", action, by, request.client or "-", text)


def admin_route(
    reader: RequestReader, method: str, path: str, serve: Callable[..., Awaitable[None]], summary: str
) -> HttpRoute:
    """Return a route for admins; `serve` receives the request, its caller and the parameters of the path."""

    async def check_and_serve(request: Request, *parameters: str) -> None:
        caller = reader.authenticate(request)
        caller.check_admin()
        await serve(request, caller, *parameters)

    return HttpRoute(method, path, check_and_serve, f"{summary}; for admins")


_COLUMNS = ("pool", "class", "tenant", "engine_seconds", "gpu_seconds", "imposed_delay_seconds")
# Spreadsheets evaluate cells that begin with these; clients may choose the names of tenants.
_FORMULAS = ("=", "+", "-", "@", "\t", "\r")

USAGE_COUNTS = ("requests", "prompt_tokens", "cached_tokens", "generated_tokens")
_USAGE_COLUMNS = ("day", "key", "model", *USAGE_COUNTS, "cost")


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


# The caller is interactive, and a healthy scheduler answers sooner.
QUERY_TIMEOUT_S = 5.0

Query = Callable[[str, SchedulerQueries], Awaitable[Mapping[str, Any]]]
"""A query to a model's scheduler, given the model's name."""


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


async def query_all(
    queries: Mapping[str, SchedulerQueries], query: Query, timeout_s: float = QUERY_TIMEOUT_S
) -> list[Mapping[str, Any]]:
    """Query the schedulers of all models at once; a failed query yields the model's name and the error."""

    async def answer(model: str, scheduler: SchedulerQueries) -> Mapping[str, Any]:
        try:
            return await asyncio.wait_for(query(model, scheduler), timeout_s)
        except TimeoutError:
            return {"model": model, "error": f"its scheduler has not responded for {timeout_s:g} s"}
        except Exception as error:  # noqa: BLE001 - whatever keeps one scheduler from answering
            return {"model": model, "error": f"its scheduler does not respond: {error!r}"}

    return await asyncio.gather(*map(answer, queries.keys(), queries.values()))


KEYS_PATH = "/admin/keys"
_KEY = KEYS_PATH + "/{key_id}"

_FIXED = frozenset({"id", "hash", "created_at", "revoked_at"})
_PERMISSIONS = frozenset(KeyRecord.__struct_fields__) - _FIXED

T = TypeVar("T")


class KeyAdmin:
    """The `/admin/keys` API.

    Args:
        path: the file of keys; None if none is configured.
    """

    def __init__(self, reader: RequestReader, budgets: Budgets, path: Path | None) -> None:
        self._reader, self._budgets, self._path = reader, budgets, path

    def change(self, path: Path | None) -> None:
        """Use another file."""
        self._path = path

    def routes(self) -> Iterator[HttpRoute]:
        """Yield the routes of this API."""
        route = partial(admin_route, self._reader)
        yield route("GET", KEYS_PATH, self._list, "API keys of the file, with what they have used")
        yield route("POST", KEYS_PATH, self._create, "create an API key")
        yield route("POST", _KEY, self._change, "change an API key")
        yield route("DELETE", _KEY, self._revoke, "revoke an API key")

    @property
    def _file(self) -> Path:
        if self._path is None:
            message = (
                "there is no file of keys: set gateway.keys_file, and create the first key by `ewsjf keys`"
            )
            raise RequestRejected(Outcome.REJECTED_INVALID, message, code="no_keys_file", status=409)
        return self._path

    async def _list(self, request: Request, _: Caller) -> None:
        path = self._file
        keys = await _in_thread(lambda: read_keys(path))
        await self._budgets.read([key.id for key in keys])
        listed = [{**key.shown(), "used": self._used(key.id)} for key in keys]
        request.respond_json({"file": str(path), "keys": listed})

    def _used(self, key_id: str) -> dict[str, dict[str, float]]:
        spent = {period: self._budgets.spent(key_id, period) for period in PERIODS}
        return {period: {"tokens": tokens, "cost": cost} for period, (tokens, cost) in spent.items()}

    async def _create(self, request: Request, caller: Caller) -> None:
        path, permissions = self._file, await self._permissions(request)
        if not permissions.get("tenant"):
            message = "a key belongs to a tenant: name one"
            raise RequestRejected(Outcome.REJECTED_INVALID, message, param="tenant")
        record, secret = await _in_thread(lambda: create_key(path, **permissions))
        audit("key_created", caller, request, key=record.id, **permissions)
        request.respond_json({**record.shown(), "secret": secret})

    async def _change(self, request: Request, caller: Caller, key_id: str) -> None:
        path, permissions = self._file, await self._permissions(request)
        record = await _in_thread(lambda: change_key(path, key_id, **permissions))
        audit("key_changed", caller, request, key=record.id, **permissions)
        request.respond_json(record.shown())

    async def _revoke(self, request: Request, caller: Caller, key_id: str) -> None:
        path = self._file
        record = await _in_thread(lambda: revoke_key(path, key_id))
        audit("key_revoked", caller, request, key=record.id, tenant=record.tenant)
        request.respond_json(record.shown())

    async def _permissions(self, request: Request) -> Mapping[str, Any]:
        example = '{"tenant": "app", "tokens_per_day": 1000000}'
        permissions = await self._reader.document(request, dict[str, Any], example)
        for name in permissions.keys() - _PERMISSIONS:
            known = ", ".join(sorted(_PERMISSIONS))
            message = f"a key has no permission {name[:100]!r}; permissions: {known}"
            raise RequestRejected(Outcome.REJECTED_INVALID, message, param=name[:100])
        return permissions


async def _in_thread(work: Callable[[], T]) -> T:
    """Run work on the key file, which may be on a slow file system.

    Raises:
        RequestRejected: it failed.
    """
    try:
        return await asyncio.to_thread(work)
    except KeysFileError as error:
        is_missing = isinstance(error, UnknownKeyError)
        raise RequestRejected(
            Outcome.REJECTED_INVALID, str(error), code="keys_file", status=404 if is_missing else 409
        ) from error
    except (msgspec.ValidationError, ValueError) as error:
        raise RequestRejected(Outcome.REJECTED_INVALID, f"the key is not valid: {error}") from error


ENDPOINTS_PATH = "/admin/endpoints"

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
        route = partial(admin_route, self._reader, path=ENDPOINTS_PATH)
        yield route("GET", serve=self._show, summary="endpoints of pools with external engines")
        added = "add an endpoint, or restore a removed one"
        yield route("POST", serve=partial(self._change, "add"), summary=added)
        yield route("DELETE", serve=partial(self._change, "remove"), summary="remove an endpoint")

    async def _show(self, request: Request, _: Caller) -> None:
        found = await asyncio.gather(*map(self._describe, self._watchers))
        request.respond_json({"endpoints": list(chain.from_iterable(found))})

    async def _describe(self, watched: tuple[str, str]) -> list[dict[str, object]]:
        model, pool = watched
        try:
            found = await asyncio.wait_for(self._watchers[watched].describe(), _WATCHER_TIMEOUT_S)
        except Exception as error:  # noqa: BLE001 - whatever keeps one watcher from answering
            found = [{"pool": pool, "error": f"its watcher does not respond: {error!r}"}]
        return [{"model": model, **endpoint} for endpoint in found]

    async def _change(self, action: str, request: Request, caller: Caller) -> None:
        """Add, restore or remove an endpoint. A removed endpoint completes its running requests."""
        change = await self._reader.document(request, EndpointChange, '{"url": "http://host:8000"}')
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
        audit(f"endpoint_{action}", caller, request, model=model, pool=pool, url=change.url)
        request.respond_json({"model": model, "pool": pool, **answer})

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
        share = "share of the traffic that is scheduled"
        yield admin_route(self._reader, "GET", MODE_PATH, self._show, share)
        yield admin_route(self._reader, "POST", MODE_PATH, self._change, f"change the {share}")

    async def _show(self, request: Request, _: Caller) -> None:
        await self._respond(request, self._queries)

    async def _change(self, request: Request, caller: Caller) -> None:
        example = '{"active_share": 0.1}, a share from 0 to 1'
        change = await self._reader.document(request, ModeChange, example)
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
            audit("mode_changed", caller, request, model=model, active_share=change.active_share)
        await self._respond(request, chosen)

    async def _respond(self, request: Request, chosen: Mapping[str, SchedulerQueries]) -> None:
        """Return the scheduled share and queue times of these models."""
        request.respond_json({"models": await query_all(chosen, _named("mode"))})


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
        ignored_objectives: Mapping[str, int] = MappingProxyType({}),
    ) -> None:
        self._queries = queries
        self._reader = reader
        self._prices = prices
        self._ignored_objectives = ignored_objectives

    def routes(self) -> Iterator[HttpRoute]:
        """Yield the routes of all pages."""
        pages: tuple[tuple[str, str, Query, str], ...] = (
            ("GET", "queue", _named("queue"), "queued requests by sub-queue, with wait causes"),
            ("GET", "scaling", _named("scaling"), "desired replicas of each pool, with reasons"),
            ("GET", "usage", self._usage, "usage by API key"),
            ("GET", "costs", _named("costs"), "engine time and imposed delay by pool, class and tenant"),
            ("GET", "tuner", _tuner, "state and history of the tuner"),
            ("POST", "tuner/freeze", partial(_set_frozen, "frozen by an admin"), "freeze the tuner"),
            ("POST", "tuner/thaw", partial(_set_frozen, ""), "thaw the tuner"),
        )
        route = partial(admin_route, self._reader)
        for method, name, query, summary in pages:
            yield route(method, f"/debug/{name}", partial(self._show, query), summary)
        yield route("GET", "/debug/status", self._status, "replicas, learned queues and the tuner")
        recent = (
            "trace of the requests of the last ten minutes, without text; with full=true also tenants, "
            "outcomes and times"
        )
        yield route("GET", "/debug/capture", self._capture, recent)
        yield route("GET", "/debug/costs.csv", self._cost_table, "`/debug/costs` as CSV")
        yield route("GET", "/debug/usage.csv", self._usage_table, "usage by API key as CSV")
        receipt = "receipt of a request (times and wait causes), until ten minutes after its end"
        yield route("GET", RECEIPTS_PATH, self._receipt, receipt)
        program = "where the time of an agent program went, with its last turns"
        yield route("GET", PROGRAMS_PATH, self._program, program)

    async def _status(self, request: Request, _: Caller) -> None:
        known = self._reader.objectives
        # Others were ignored because a key does not allow them, or are known by now.
        unknown = {name: count for name, count in self._ignored_objectives.items() if name not in known}
        objectives = {"unknown_objectives": unknown, "known_objectives": sorted(known)} if unknown else {}
        request.respond_json({"models": await query_all(self._queries, _named("status")), **objectives})

    async def _receipt(self, request: Request, _: Caller, request_id: str) -> None:
        """Return the receipt of a request of any model.

        Raises:
            RequestRejected: no scheduler has the request.
        """
        found_by = await query_all(
            self._queries, lambda _, scheduler: scheduler.query("receipt", request_id=request_id)
        )
        receipts = [found for found in found_by if "request_id" in found]
        if not receipts:
            message = _NO_RECEIPT.format(request_id=request_id)
            raise RequestRejected(Outcome.REJECTED_INVALID, message, code="not_found", status=404)
        # A request to a route may have been rejected by one model before another one served it.
        found = max(receipts, key=lambda receipt: receipt.get("outcome") in (None, Outcome.COMPLETED))
        request.respond_json(found)

    async def _program(self, request: Request, _: Caller, name: str) -> None:
        """Return where the time of a program went, for each tenant and model that has one with this id.

        Raises:
            RequestRejected: no scheduler has the program.
        """
        models = await self._complete(lambda _model, scheduler: scheduler.query("program", program=name))
        found = [each for model in models for each in model.get("programs", ())]
        if not found:
            message = _NO_PROGRAM.format(name=name)
            raise RequestRejected(Outcome.REJECTED_INVALID, message, code="not_found", status=404)
        request.respond_json({"programs": found})

    async def _capture(self, request: Request, _: Caller) -> None:
        lines = b""
        # Without the argument, schedulers of older releases understand the query.
        chosen = {"full": True} if request.query().get("full") == ["true"] else {}
        for model, scheduler in self._queries.items():
            for line in await query_scheduler(model, scheduler, "capture", **chosen):
                lines += encode({**line, "model": model}) + b"\n"
        request.respond(200, [_JSONL_TYPE], lines)

    async def _cost_table(self, request: Request, _: Caller) -> None:
        models = await self._complete(lambda _model, scheduler: scheduler.query("costs"))
        request.respond(200, [_CSV_TYPE], cost_table(models).encode())

    async def _complete(self, query: Query) -> list[Mapping[str, Any]]:
        """Query all schedulers; raise if one fails, because a table without its rows would look complete."""
        models = await query_all(self._queries, query)
        if errors := [f"{model['model']}: {model['error']}" for model in models if "error" in model]:
            message = "; ".join(errors)
            raise RequestRejected(Outcome.FAILED, message, code="scheduler_unavailable", status=503)
        return models

    async def _usage_table(self, request: Request, _: Caller) -> None:
        models = await self._complete(self._usage)
        rows = [row for model in models for row in model["rows"]]
        request.respond(200, [_CSV_TYPE], usage_table(rows).encode())

    async def _usage(self, _model: str, scheduler: SchedulerQueries) -> Mapping[str, Any]:
        """Return the usage of each key by day, with its cost where the model has prices."""
        usage: Mapping[str, Any] = await scheduler.query("usage")
        rows = [{**row, "cost": self._cost(row)} for row in usage.get("rows", ())]
        return {**usage, "rows": rows}

    def _cost(self, row: Mapping[str, Any]) -> float | None:
        price = self._prices.get(row["model"])
        return None if price is None else price.of(tokens_of([row[name] for name in USAGE_COUNTS]))

    async def _show(self, query: Query, request: Request, caller: Caller) -> None:
        models = await query_all(self._queries, query)
        if request.exchange.method == "POST":
            audit(request.path.removeprefix("/debug/").replace("/", "_"), caller, request)
        request.respond_json({"models": models})


def _named(query: str) -> Query:
    return lambda _model, scheduler: scheduler.query(query)


async def _tuner(model: str, scheduler: SchedulerQueries) -> Mapping[str, Any]:
    """Return the part of the status that describes the tuner."""
    status = await scheduler.query("status")
    return {"model": model, **status["tuner"]}


async def _set_frozen(reason: str, model: str, scheduler: SchedulerQueries) -> Mapping[str, Any]:
    """Freeze the tuner with a reason, or thaw it with an empty one, and describe the effect."""
    await scheduler.query("freeze", reason=reason)
    return {"model": model, "frozen": reason, "message": _FROZEN if reason else _THAWED}


ENGINES_PATH = "/metrics/engines"
_CONTENT_TYPE = b"content-type"
# Shorter than usual scrape intervals, so that several scrapers cost an engine as much as one.
_KEPT_S = 1.0
_TIMEOUT_S = 5.0


@dataclass(frozen=True, slots=True)
class _Page:
    content_type: bytes
    text: bytes


class EnginePages:
    """The `/metrics/engines` endpoint; `check` raises `RequestRejected` for headers without access."""

    def __init__(
        self,
        upstream: UpstreamPool,
        schedulers: Mapping[str, SchedulerClient],
        check: Callable[[Mapping[bytes, bytes]], None],
    ) -> None:
        self._upstream = upstream
        # Each of a model's names maps to the same scheduler; the model's own name is first.
        self._models = {id(scheduler): model for model, scheduler in reversed([*schedulers.items()])}
        self._schedulers = {id(scheduler): scheduler for scheduler in schedulers.values()}
        self._check = check
        self._pages: dict[str, asyncio.Task[_Page | RequestRejected]] = {}

    async def serve(self, request: Request) -> None:
        """Return the targets, or the metrics of the replica named by `?replica=`.

        Raises:
            RequestRejected: access is denied, the replica is unknown, or it does not answer.
        """
        self._check(request.headers)
        asked = request.query().get("replica")
        if asked is None:
            # The address that the scraper used is one that it can reach.
            host = request.headers.get(b"host", b"").decode("latin-1")
            request.respond_json([*self._targets(host)])
            return
        page = await self._page(asked[0])
        request.respond(200, [(_CONTENT_TYPE, page.content_type)], page.text)

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
        """Return the recently cached page of a replica; concurrent callers share one fetch."""
        fetching = self._pages.get(replica_id)
        if fetching is None:
            address = next((one for _, one in self._replicas() if one.replica_id == replica_id), None)
            if address is None:
                message = f"unknown replica {replica_id[:200]}: see {ENGINES_PATH}"
                raise RequestRejected(Outcome.REJECTED_INVALID, message, code="not_found", status=404)
            loop = asyncio.get_running_loop()
            # In an empty context, because Ray Serve cancels a request's tasks with the request.
            fetching = loop.create_task(self._fetched(address), context=contextvars.Context())
            fetching.add_done_callback(
                lambda _: loop.call_later(_KEPT_S, self._pages.pop, replica_id, None),
            )
            self._pages[replica_id] = fetching
        found = await asyncio.shield(fetching)
        if isinstance(found, RequestRejected):
            # A new exception each time, because a raised one keeps its traceback.
            raise RequestRejected(found.outcome, found.message, status=found.status)
        return found

    async def _fetched(self, address: ReplicaAddress) -> _Page | RequestRejected:
        try:
            async with asyncio.timeout(_TIMEOUT_S):
                response, text = await self._upstream.fetch(address.server, engine_head(address, "/metrics"))
        except (UpstreamError, TimeoutError) as error:
            reason = f"replica {address.replica_id} gave no metrics: {error or 'it took too long'}"
            return RequestRejected(Outcome.FAILED, reason, status=502)
        if response.status != 200:
            reason = f"replica {address.replica_id} answered {response.status} to a scrape"
            return RequestRejected(Outcome.FAILED, reason, status=502)
        return _Page(response.header(_CONTENT_TYPE), text)
