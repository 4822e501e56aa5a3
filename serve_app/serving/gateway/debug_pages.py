"""Admin endpoints under `/debug`.

GET   /debug/queue, /debug/status, /debug/scaling, /debug/usage, /debug/costs, /debug/tuner
GET   /debug/costs.csv, /debug/usage.csv: the same as `/debug/costs` and `/debug/usage`, as tables
GET   /debug/requests/ID: where the time of a request went, for ten minutes after its end
GET   /debug/programs/ID: where the time of an agent program went, for six hours after its last turn
GET   /debug/capture: the requests of the last ten minutes as a trace without text, as JSON Lines;
      with ?full=true also tenants, outcomes and times, and requests that did not complete
POST  /debug/tuner/freeze, /debug/tuner/thaw
"""

from collections.abc import Iterator, Mapping
from functools import partial
from types import MappingProxyType
from typing import Any

from serve_app.core.admission.key_limits import TokenPrices
from serve_app.errors import Outcome
from serve_app.serving.channel.scheduler_client import SchedulerQueries
from serve_app.serving.gateway.answer.responses import RequestRejected, encode, send_body, send_json
from serve_app.serving.gateway.audit import audit
from serve_app.serving.gateway.budgets import tokens_of
from serve_app.serving.gateway.request.incoming import IncomingRequest
from serve_app.serving.gateway.request.reader import RequestReader
from serve_app.serving.gateway.router import HttpRoute
from serve_app.serving.gateway.scheduler_queries import Query, query_all, query_scheduler
from serve_app.serving.gateway.tables import USAGE_COUNTS, cost_table, usage_table

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
        pages: tuple[tuple[str, str, Query, str], ...] = (
            ("GET", "queue", _named("queue"), "queued requests by sub-queue, with wait causes"),
            ("GET", "status", _named("status"), "replicas, learned queues and the tuner"),
            ("GET", "scaling", _named("scaling"), "desired replicas of each pool, with reasons"),
            ("GET", "usage", self._usage, "usage by API key"),
            ("GET", "costs", _named("costs"), "engine time and imposed delay by pool, class and tenant"),
            ("GET", "tuner", _tuner, "state and history of the tuner"),
            ("POST", "tuner/freeze", partial(_set_frozen, "frozen by an admin"), "freeze the tuner"),
            ("POST", "tuner/thaw", partial(_set_frozen, ""), "thaw the tuner"),
        )
        for method, name, query, summary in pages:
            yield HttpRoute(method, f"/debug/{name}", partial(self._show, query), f"{summary}; for admins")
        recent = (
            "trace of the requests of the last ten minutes, without text; with full=true also tenants, "
            "outcomes and times; for admins"
        )
        yield HttpRoute("GET", "/debug/capture", self._capture, recent)
        yield HttpRoute("GET", "/debug/costs.csv", self._cost_table, "`/debug/costs` as CSV; for admins")
        yield HttpRoute("GET", "/debug/usage.csv", self._usage_table, "usage by API key as CSV; for admins")
        receipt = "receipt of a request (times and wait causes), until ten minutes after its end; for admins"
        yield HttpRoute("GET", RECEIPTS_PATH, self._receipt, receipt)
        program = "where the time of an agent program went, with its last turns; for admins"
        yield HttpRoute("GET", PROGRAMS_PATH, self._program, program)

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
        return None if price is None else price.of(tokens_of([row[name] for name in USAGE_COUNTS]))

    async def _show(self, query: Query, incoming: IncomingRequest) -> None:
        caller = self._reader.authenticate(incoming)
        caller.check_admin()
        models = await query_all(self._queries, query)
        if incoming.method == "POST":
            audit(incoming.path.removeprefix("/debug/").replace("/", "_"), caller, incoming)
        await send_json(incoming.send, 200, encode({"models": models}), [])


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
