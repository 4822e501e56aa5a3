"""Receipts of requests and programs, and queue updates.

- `Receipts`: stage times and wait causes of recently ended requests, and of running ones so far.
- `programs_named`: receipts of programs, in total and by turn.
- `QueueWatch`: sends gateways the outlooks of the waiting requests whose clients subscribe.

`Receipts`. The scheduler knows why a request waited, and its gateway how long everything else took. The
gateway reports that with the request's end, so any gateway can serve the complete receipt. Times are
differences on one clock each; clocks of gateway and scheduler are not compared.

Stages are exact and add up to the total time. Parts of a stage are reported by the engine if possible; the
rest is network time, including the reading of the request. For other engines only the usual duration of the
prefill is known. The rest then counts as a wait in the engine, and both are marked as estimates.

Requests served during a wait are counted on demand from the history of dispatches.

`programs_named`. The sums cover all turns since the scheduler started. Turns are listed as long as their
receipts are kept. The first request of a conversation without a stated id is not a turn yet, and is not
included.

`QueueWatch`. All outlooks are estimated together, four times per second, or less often if that would exceed a
small share of the scheduler's time. An update runs in parts, between other events. Without subscribers, there
is no timer.
"""

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import chain
from time import perf_counter
from typing import Any

from serve_app.core import Scheduler
from serve_app.core.accounting.wait_causes import WaitBreakdown, WaitCause
from serve_app.core.accounting.waits import current_cause, wait_so_far
from serve_app.core.commands import Conclude, Dispatch
from serve_app.core.outlook.watched import CalibrationError, Outlook, WatchedRequests, expected_order
from serve_app.core.programs.program import Program, ProgramTurn
from serve_app.core.programs.program_scheduler import program_document
from serve_app.core.request import ScheduledRequest, TargetState
from serve_app.request import EngineTimes, RequestTimes, stages
from serve_app.serving.channel.scheduler_client import RequestOutlook
from serve_app.serving.process import run_in_parts
from serve_app.serving.scheduler.journal import Attempt, Entry, HistoryRecord, RequestHistory, Stall

logger = logging.getLogger("ray.serve")

_INTERVAL_S = 0.25
# Maximum share of the scheduler's time; with thousands of subscribers, updates become less frequent.
_MAX_SHARE = 0.05


class QueueWatch:
    """Watched requests of one live scheduler; `send` sends outlooks, `count` records their errors."""

    def __init__(
        self,
        core: Scheduler,
        now: Callable[[], float],
        send: Callable[[Iterable[RequestOutlook]], None],
        count: Callable[[Iterable[CalibrationError]], None],
    ) -> None:
        self._now, self._send, self._count = now, send, count
        self.watched = WatchedRequests(core)
        self._loop = asyncio.get_running_loop()
        self._timer: asyncio.Handle | None = None
        self._update_is_due_at = 0.0
        self._stopped = False

    def __repr__(self) -> str:
        return f"<QueueWatch {self.watched}>"

    def watch(self, request_id: str) -> None:
        """Send updates of a request while it waits."""
        if not self._stopped and self.watched.watch(request_id, self._now()) and self._timer is None:
            self._timer = self._loop.call_at(self._update_is_due_at, self._update)

    def handlers(self) -> Mapping[type, Callable[..., None]]:
        """Return the handlers that learn from requests and record the errors of their estimates."""
        return {Dispatch: self._on_dispatch, Conclude: self._on_conclusion}

    def _on_dispatch(self, entry: Entry, _command: Dispatch, scheduled: ScheduledRequest) -> None:
        if self.watched:
            self._count(self.watched.on_dispatch(scheduled, entry.now))

    def _on_conclusion(self, entry: Entry, command: Conclude, _scheduled: ScheduledRequest) -> None:
        if self.watched:
            outcome = command.conclusion.outcome
            self._count(self.watched.on_conclusion(command.request_id, outcome, entry.now))

    def stop(self) -> None:
        """Send no further updates."""
        self._stopped = True
        if self._timer is not None:
            self._timer.cancel()

    def _update(self) -> None:
        self._continue(self.watched.updates(self._now()), 0.0)

    def _continue(self, look: Iterator[list[Outlook]], took_s: float) -> None:
        """Run one part of an update, and schedule the next part or the next update."""
        began = perf_counter()
        try:
            updates = next(look, None)
            if updates:
                self._send(map(_as_message, updates))
        except Exception:
            # Scheduling does not depend on it, so it continues.
            logger.exception("event=queue_outlook_failed")
            updates = None
        took_s += perf_counter() - began
        if self._stopped:
            return
        if updates is not None:
            self._timer = self._loop.call_soon(self._continue, look, took_s)
            return
        self._update_is_due_at = self._loop.time() + max(_INTERVAL_S, took_s / _MAX_SHARE)
        self._timer = self._loop.call_at(self._update_is_due_at, self._update) if self.watched else None


def _as_message(outlook: Outlook) -> RequestOutlook:
    start = outlook.start
    if start is None:
        return RequestOutlook(outlook.request_id, outlook.position, None, None, None)
    times = round(start.middle, 3), round(start.low, 3), round(start.high, 3)
    return RequestOutlook(outlook.request_id, outlook.position, *times)


MAX_NAMED = 10
"""Number of tenants and classes listed by name; the others are counted together."""
# Dispatches examined before yielding to the event loop: about half a millisecond.
_LOOKED_AT = 1_000


class Receipts:
    """Receipts of one scheduler's requests, as documents for operators and tools.

    All times in them are milliseconds, except `arrived_at`, which is in seconds since the epoch.
    """

    def __init__(self, core: Scheduler, history: RequestHistory, outlook: QueueWatch) -> None:
        self._core = core
        self._history = history
        self._outlook = outlook

    def __repr__(self) -> str:
        return f"<Receipts of {self._history}>"

    async def document(self, request_id: str, now: float) -> dict[str, Any]:
        """Return the receipt of a request, by its own id or its client's; empty if it is unknown."""
        known = self._history.find(request_id)
        if known is None:
            return {}
        if known.conclude is None:
            scheduled = self._core.find(known.request_id)
            return {} if scheduled is None else await self._unfinished(known, scheduled, now)
        conclusion, last, usage, times = (
            known.conclude.conclusion,
            known.last,
            known.usage,
            known.times,
        )
        served = None
        if known.waited.causes and known.pool:
            served = await self._served(known, known.pool, known.ended_at, waits=known.ended_waiting)
        return {
            **_facts(known),
            "endpoint": times.endpoint if times is not None else None,
            "state": "ended",
            "outcome": conclusion.outcome.value,
            "message": conclusion.message,
            "stages": _stages_of(times, known.wait_s or 0.0, last.prefill_s if last is not None else None),
            "queue": _queue_figures(known, known.waited, known.wait_s or 0.0, served),
            "latency_target": _target(known.target),
            "longest_gap": _gap(known.stall),
            "tokens": {
                "budget": last.dispatch.estimated_tokens if last is not None else None,
                "expected_prompt": last.prompt_tokens if last is not None else None,
                "expected_output": last.output_tokens if last is not None else None,
                "to_prefill": last.prefill_tokens if last is not None else None,
                "prompt": usage.prompt_tokens if usage is not None else None,
                "cached": usage.cached_tokens if usage is not None else None,
                "output": usage.output_tokens if usage is not None else None,
            },
        }

    async def _unfinished(
        self, known: HistoryRecord, scheduled: ScheduledRequest, now: float
    ) -> dict[str, Any]:
        waits, last, predicted = scheduled.queued, known.last, scheduled.prediction
        if waits:
            waited, wait_s = wait_so_far(scheduled, now), now - known.arrived_at
            pool, until = scheduled.pools[0], now
        elif last is None:
            # An earlier scheduler dispatched it, at a time between its arrival and its report to this one.
            waited, wait_s = WaitBreakdown(), scheduled.dispatched_at - known.arrived_at
            pool, until = scheduled.pools[0], now
        else:
            waited, wait_s = last.dispatch.waited or WaitBreakdown(), last.dispatch.queue_wait_s
            pool, until = last.dispatch.pool, last.at
        # Before `_served`, which yields to the event loop, so that the outlook matches `now`.
        place = await self._place(scheduled, now) if waits else {}
        served = None
        if waited.causes:
            served = await self._served(known, pool, until, waits=waits)
        queue = _queue_figures(known, waited, wait_s, served)
        queue["predicted_ms"] = _in_ms(predicted.wait_s if predicted is not None else None)
        return {
            **_facts(known),
            "endpoint": None,
            "state": "waiting" if waits else "running",
            "outcome": None,
            "message": "",
            "stages": [_stage(name, seconds) for name, seconds in _stages_so_far(scheduled, wait_s, now)],
            "queue": {**queue, **place},
            "latency_target": _target(scheduled.target),
            "longest_gap": None,
            "tokens": {
                "budget": scheduled.estimate.budget_tokens,
                "expected_prompt": scheduled.estimate.expected_prompt_tokens,
                "expected_output": scheduled.estimate.expected_output_tokens,
                "to_prefill": scheduled.prefill_tokens,
                **dict.fromkeys(("prompt", "cached", "output")),
            },
        }

    async def _place(self, scheduled: ScheduledRequest, now: float) -> dict[str, Any]:
        """Return the position and outlook of a waiting request."""
        cause, obstacles = current_cause(scheduled), self._core.dispatcher.wait_reasons(scheduled, now)
        home, core = scheduled.pools[0], self._core
        orders = await run_in_parts(expected_order(core.queue, core.settings.class_floors, now))
        order = orders.get(home, ())
        outlook = self._outlook.watched.expected(scheduled, order, now)
        start = outlook.start if outlook is not None else None
        return {
            "current_cause": cause.value,
            "meaning": cause.meaning,
            "obstacles": obstacles,
            "length_queue": scheduled.length_queue,
            "pool": home,
            "position": outlook.position if outlook is not None else None,
            "waiting": len(order),
            "expected_ms": _in_ms(start.middle) if start is not None else None,
            "expected_between_ms": [_in_ms(start.low), _in_ms(start.high)] if start is not None else None,
            "expires_in_ms": _in_ms(scheduled.expires_at - now),
        }

    async def _served(self, known: HistoryRecord, pool: str, until: float, *, waits: bool) -> dict[str, Any]:
        """Count others' requests that were dispatched to the pool during a wait, by class and tenant.

        Args:
            waits: the wait was not ended by a dispatch of the request.
        """
        since, before = known.arrived_at, self._history.dispatches + 1
        if not waits and known.last is not None:
            before = known.last.number
        is_complete = self._history.complete_since <= since
        counts: Counter[tuple[str, str]] = Counter()
        for looked_at, (attempt, other) in enumerate(self._history.attempts_since(since), start=1):
            if looked_at % _LOOKED_AT == 0:
                # Yield, so that other work is not delayed.
                await asyncio.sleep(0)
            if (
                since <= attempt.at <= until
                and attempt.number < before
                and attempt.dispatch.pool == pool
                and other.request_id != known.request_id
            ):
                counts[other.request.priority.value, other.request.tenant] += 1
        named = counts.most_common(MAX_NAMED)
        return {
            "pool": pool,
            "requests": counts.total(),
            "by": [
                {"class": priority, "tenant": tenant, "requests": count}
                for (priority, tenant), count in named
            ],
            "others": counts.total() - sum(count for _, count in named),
            "is_complete": is_complete,
        }


def _facts(known: HistoryRecord) -> dict[str, Any]:
    submission = known.request.submission
    return {
        "request_id": known.request_id,
        "client_request_id": known.client_request_id,
        "model": submission.spec.model,
        "tenant": submission.tenant,
        "class": submission.priority.value,
        "arrived_at": known.arrived_unix_s,
        "attempts": [_attempt(each, known.attempts[0]) for each in known.attempts],
    }


def _target(target: TargetState | None) -> dict[str, Any] | None:
    """Return the latency target of a request, what was expected on its arrival, and what became of it."""
    if target is None:
        return None
    return {
        "ttft_ms": _in_ms(target.limits.ttft_s),
        "tpot_ms": _in_ms(target.limits.tpot_s),
        "refuse": target.limits.refuse,
        "expected_ttft_ms": _in_ms(target.expected_s),
        "chance_of_miss": None if target.chance is None else round(target.chance, 3),
        "ttft_met": target.is_met,
    }


def _gap(stall: Stall | None) -> dict[str, Any] | None:
    """Return the longest gap of a stream, and its cause."""
    if stall is None:
        return None
    return {"ms": _in_ms(stall.seconds), "cause": stall.cause.value, "prefill_tokens": stall.prefill_tokens}


def _attempt(attempt: Attempt, first: Attempt) -> dict[str, Any]:
    dispatch = attempt.dispatch
    return {
        "after_first_ms": _in_ms(attempt.at - first.at),
        "pool": dispatch.pool,
        "home_pool": attempt.pools[0] if attempt.pools else None,
        "replica": dispatch.replica_id,
        "length_queue": dispatch.length_queue,
        "engine_priority": dispatch.engine_priority,
        "bypassed": dispatch.passed,
        "expected_prefill_ms": _in_ms(attempt.prefill_s),
    }


def _queue_figures(
    known: HistoryRecord, waited: WaitBreakdown, wait_s: float, served: dict[str, Any] | None
) -> dict[str, Any]:
    return {
        "ms": _in_ms(wait_s),
        "predicted_ms": _in_ms(known.attempts[0].predicted_wait_s if known.attempts else None),
        "causes": [
            {"cause": cause.value, "ms": nanoseconds / 1e6, "meaning": cause.meaning}
            for cause, nanoseconds in waited.causes.items()
        ],
        "ahead": {cause.value: count for cause, count in waited.ahead.items()},
        "served": served,
    }


def _stages_of(times: RequestTimes | None, wait_s: float, prefill_s: float | None) -> list[dict[str, Any]]:
    """Return the stages of a request that has ended, with their parts.

    Args:
        times: times reported by the gateway; None if it reported none.
        prefill_s: usual duration of a prefill of this length; None if it was never dispatched.
    """
    found: list[dict[str, Any]] = []
    for name, seconds in stages(wait_s) if times is None else times.stages(wait_s):
        each = _stage(name, seconds)
        if parts := list(_parts(name, seconds, times, prefill_s)):
            each["parts"] = parts
        found.append(each)
    return found


def _stages_so_far(scheduled: ScheduledRequest, wait_s: float, now: float) -> Iterator[tuple[str, float]]:
    """Yield the stages seen by the scheduler; the gateway reports its own times at the end."""
    if scheduled.queued:
        return stages(wait_s)
    sent_s, started_at = now - scheduled.dispatched_at, scheduled.started_at
    if started_at is not None:
        first_token_s = started_at - scheduled.dispatched_at
        return stages(wait_s, first_token_s=first_token_s, engine_s=sent_s)
    if scheduled.started:
        # An earlier scheduler received its first token.
        return stages(wait_s, engine_s=sent_s)
    return stages(wait_s, first_token_s=sent_s)


def _parts(
    name: str, seconds: float, times: RequestTimes | None, prefill_s: float | None
) -> Iterator[dict[str, Any]]:
    reported = times.engine if times is not None else None
    if reported is not None and reported.queue_s is not None and reported.prefill_s is not None:
        yield from _reported_parts(name, seconds, reported)
    elif name == "until_first_token" and prefill_s is not None:
        prefill = min(seconds, prefill_s)
        yield {"part": "engine_queue", "ms": _in_ms(seconds - prefill), "estimated": True}
        yield {"part": "prefill", "ms": _in_ms(prefill), "estimated": True}


def _reported_parts(name: str, seconds: float, reported: EngineTimes) -> Iterator[dict[str, Any]]:
    named = [("engine_queue", reported.queue_s), ("prefill", reported.prefill_s)]
    if name == "engine" and reported.generation_s is not None:
        named.append(("generation", reported.generation_s))
    elif name != "until_first_token":
        return
    known = sum(each for _, each in named if each is not None)
    # The two clocks differ, so the engine's times may slightly exceed the gateway's.
    for part, each in [("network", max(0.0, seconds - known)), *named]:
        yield {"part": part, "ms": _in_ms(each), "estimated": False}


def _stage(name: str, seconds: float) -> dict[str, Any]:
    return {"stage": name, "ms": _in_ms(seconds)}


def _in_ms(seconds: float | None) -> float | None:
    """Convert to milliseconds, rounded to the microsecond."""
    return None if seconds is None else round(seconds * 1e3, 3)


_MOST_TURNS = 50
# Requests examined before yielding to the event loop: less than a millisecond.
_TURNS_LOOKED_AT = 2_000


async def programs_named(name: str, core: Scheduler, history: RequestHistory, now: float) -> dict[str, Any]:
    """Return the receipts of all tenants' programs with an id."""
    model, found = core.settings.model, core.programs.table.named(name)
    documents = [
        {"model": model, **program_document(core.programs, program, now), "last_turns": []}
        for program in found
    ]
    for program, document in zip(found, documents, strict=True):
        document["last_turns"] = await _turns(program, history, now)
    return {"model": model, "programs": documents}


async def _turns(program: Program, history: RequestHistory, now: float) -> list[dict[str, Any]]:
    """Return the last turns, the earliest first. All times are in seconds."""
    found: list[dict[str, Any]] = []
    for looked_at, known in enumerate(chain(reversed(history.open()), reversed(history.ended())), start=1):
        if looked_at % _TURNS_LOOKED_AT == 0:
            await asyncio.sleep(0)
        if known.turn is not None and known.turn.conversation.program is program:
            found.append(_turn(known, known.turn, now))
            if len(found) == _MOST_TURNS:
                break
    # The sort is stable, so that turns of one instant stay in their order.
    found.reverse()
    return sorted(found, key=lambda each: -each["arrived_s_ago"])


def _turn(known: HistoryRecord, turn: ProgramTurn, now: float) -> dict[str, Any]:
    times, usage = known.times, known.usage
    conclude, waits = known.conclude, known.last is None and known.conclude is None
    room_ns = known.waited.causes.get(WaitCause.RESIDENCY, 0)
    first_token_s = times.first_token_s if times is not None else None
    engine_s = times.engine_s if times is not None else None
    return {
        "request_id": known.request_id,
        "session": turn.conversation.session,
        "is_sub_agent": turn.conversation.parent is not None,
        "state": conclude.conclusion.outcome.value if conclude is not None else "open",
        "arrived_s_ago": now - known.arrived_at,
        "gap_s": turn.gap_s,
        "queued_s": now - known.arrived_at if waits else known.wait_s,
        "waiting_s": None if waits else room_ns / 1e9,
        "first_token_s": first_token_s,
        "generation_s": None if engine_s is None or first_token_s is None else engine_s - first_token_s,
        "engine_s": engine_s,
        "prompt_tokens": usage.prompt_tokens if usage is not None else None,
        "cached_tokens": usage.cached_tokens if usage is not None else None,
        "output_tokens": usage.output_tokens if usage is not None else None,
    }
