"""Documents about one scheduler for operators and tools: queue, replicas, an overview, and recent traffic.

The dashboard requests the overview once per second. Its lists that grow with the fleet or with tenants are
therefore truncated; sums include all entries. `RemoteEndpoints` are the endpoints of remote pools, as their
watchers report them.
"""

import hashlib
import secrets
from collections.abc import Generator, Iterable, Iterator, Mapping
from dataclasses import asdict
from heapq import nlargest, nsmallest
from itertools import islice
from time import time
from typing import Any

from serve_app.core import Scheduler
from serve_app.core.accounting.waits import current_cause
from serve_app.core.programs.program_scheduler import programs_document
from serve_app.core.request import ScheduledRequest
from serve_app.core.routing.replica import ReplicaReport, ReplicaSpec
from serve_app.core.routing.replica_state import ReplicaState
from serve_app.core.settings_base import plain
from serve_app.errors import Outcome
from serve_app.request import PriorityClass
from serve_app.serving.scheduler.findings import time_text
from serve_app.serving.scheduler.gauges import Figures, state_of
from serve_app.serving.scheduler.journal import HistoryRecord, RequestHistory

Document = Mapping[str, Any]


class RemoteEndpoints:
    """The latest document of each remote pool's watcher; see `EndpointWatcher.states`."""

    def __init__(self) -> None:
        self._pools: dict[str, Document] = {}

    def __repr__(self) -> str:
        return f"<RemoteEndpoints {sum(len(each['down']) for each in self._pools.values())} down>"

    def update(self, document: Document) -> None:
        """Replace the document of a pool."""
        self._pools[document["pool"]] = document

    def documents(self) -> list[Document]:
        """Return the document of each remote pool."""
        return [self._pools[pool] for pool in sorted(self._pools)]

    def figures(self) -> Figures:
        """Return the numbers of endpoints by pool and state."""
        text = "Endpoints of remote pools, by whether they can be used."
        values = Figures("ewsjf_endpoints", text, "pool", "state")
        for pool, document in self._pools.items():
            # A watcher of an older release does not report the second one.
            down, asleep = len(document["down"]), len(document.get("asleep", ()))
            values[pool, "up"] = document["endpoints"] - down - asleep
            values[pool, "down"], values[pool, "asleep"] = down, asleep
        return values


# Sized for a person on a page.
_MAX_FLOORS = 50
_MAX_PROGRAMS = 50
_MAX_TENANTS = 50
SUB_QUEUES_SHOWN = 60
# Those that need attention are first.
_MAX_REPLICAS = 100


# Bounds the scheduler's time; more than an operator would read.
MAX_SUB_QUEUES = 500
# The first request of a sub-queue, and the number of requests in it.
_Heads = Iterable[tuple[ScheduledRequest, int]]


def queue_document(core: Scheduler, now: float, most: int) -> dict[str, Any]:
    """Return what is queued, for how long and why, with at most `most` sub-queues. Changes no state.

    The sub-queues whose heads have waited longest are first. `served` is the service over weight by class and
    tenant, in the units of the fairness mode.
    """
    settings, heads = core.settings, list(core.queue.sub_queue_heads())
    longest = nsmallest(most, heads, key=lambda sub_queue: sub_queue[0].request.arrived_at)
    served = {
        priority.value: counters
        for priority, shares in core.queue.shares.items()
        if (counters := shares.counters())
    }
    return {
        "model": settings.model,
        "policy": settings.policy,
        "waiting": len(core.queue),
        "in_backoff": len(core.queue.backoff),
        "programs": programs_document(core.programs, now, _MAX_PROGRAMS),
        "max_waiting": settings.max_waiting,
        "queue_timeout_s": {
            priority.value: settings.queue_timeout_s.of(priority) for priority in PriorityClass
        },
        "length_queues": list(_length_queues(core, heads, now)),
        "sub_queues": [_sub_queue(core, *sub_queue, now) for sub_queue in longest],
        "sub_queues_omitted": len(heads) - len(longest),
        "b_short_tokens": settings.routing.b_short_tokens,
        "served": served,
        "floors": _floors(core, now),
        "settings": plain(settings),
    }


def _floors(core: Scheduler, now: float) -> dict[str, Any]:
    """Return the floors, those behind most first, and what all requests and each of them were served."""
    floors = core.queue.floors
    shown = nlargest(_MAX_FLOORS, floors, key=lambda floor: floors.behind_s(floor, now))
    return {
        "tokens_per_s": sum(floor.per_s for floor in floors),
        "served_tokens_per_s": floors.served.per_s(now),
        "subjects": [
            {
                "subject": floor.subject,
                "floor_tokens_per_s": floor.per_s,
                "received_tokens_per_s": floor.received.per_s(now),
                "waiting": floor.waiting,
                "behind_s": floors.behind_s(floor, now),
            }
            for floor in shown
        ],
    }


def _length_queues(core: Scheduler, heads: _Heads, now: float) -> Iterator[dict[str, Any]]:
    """Yield the length queues, summed over all tenants and classes: by rising length, or by name.

    `waiting` does not count requests in backoff or waiting for room for their context. `head` is the
    sub-queue whose head the policy scores highest.
    """
    policy = core.queue.policy
    bounds = {each.name: each for each in policy.queue_bounds()}
    by_name: dict[str, list[tuple[ScheduledRequest, int]]] = {name: [] for name in bounds}
    for head, waiting in sorted(heads, key=lambda each: each[0].length_queue):
        by_name.setdefault(head.length_queue, []).append((head, waiting))
    for name, inside in by_name.items():
        best = max(inside, key=lambda each: (policy.score(each[0], now), -each[0].sequence), default=None)
        yield {
            "name": name,
            "bounds": {bound: getattr(bounds[name], bound) for bound in _BOUNDS} if name in bounds else None,
            "waiting": sum(waiting for _, waiting in inside),
            "longest_wait_s": max((now - head.request.arrived_at for head, _ in inside), default=None),
            "head": None if best is None else _sub_queue(core, *best, now),
        }


_BOUNDS = ("name", "min_tokens", "max_tokens", "bubble")


def _sub_queue(core: Scheduler, head: ScheduledRequest, waiting: int, now: float) -> dict[str, Any]:
    """Return one sub-queue and why its head waits: the cause as in receipts, and the reason in each pool.

    The score of the head is comparable only within one policy.
    """
    request = head.request
    return {
        "priority": request.priority,
        "tenant": request.tenant,
        "pools": head.pools,
        "length_queue": head.length_queue,
        "prefill_class": head.prefill_class,
        "waiting": waiting,
        "head": request.request_id,
        "wait_s": now - request.arrived_at,
        "score": core.queue.policy.score(head, now),
        "cause": current_cause(head),
        "reason": core.dispatcher.wait_reasons(head, now),
    }


def replica_documents(
    core: Scheduler,
    reports: Mapping[str, tuple[ReplicaSpec, ReplicaReport | None]],
    now: float,
) -> dict[str, Any]:
    """Return the state of each replica, and what is reserved on it."""
    documents: dict[str, dict[str, Any]] = {}
    for replica_id, (spec, report) in reports.items():
        state = core.ledger.get(replica_id)
        document = {
            **asdict(spec),
            **_context_of(state, spec),
            "report": asdict(report) if report else None,
            **_reserved(core, state, now),
            "stale": state is not None and state.reports.stale,
        }
        documents[replica_id] = {**document, "state": replica_state(document)}
    return documents


def _context_of(state: ReplicaState | None, spec: ReplicaSpec) -> dict[str, int | None]:
    """Return the learned context limit of a replica whose engine does not report one."""
    if spec.has_known_context:
        return {}
    context = None if state is None else state.learned.context
    learned = None if context is None else context.limit_tokens
    return {"max_model_len": None, "learned_context_tokens": learned}


def _reserved(core: Scheduler, state: ReplicaState | None, now: float) -> dict[str, Any]:
    """Return a replica's limit, and what is reserved there; nothing if the core does not know it.

    `budget_tokens` is None if the engine does not report the size of its KV cache.
    """
    if state is None:
        return {"in_flight": 0, "open": False, "limit": None}
    return {
        "in_flight": state.in_flight,
        "peak_tokens": state.peak_tokens,
        "budget_tokens": None if state.spec.kv_tokens is None else state.kv_budget,
        "reserved_tokens": state.reserved_tokens,
        "pending_prefill_tokens": state.prefills.tokens,
        "unstarted": state.unstarted,
        "suspended": state.suspension.active,
        "gated": state.gated,
        "quarantined": state.quarantined,
        "hangs": state.hang_detector.hangs,
        "open": state_of(state, core, now) == "open",
        "limit": limit_text(state, now),
    }


def limit_text(state: ReplicaState, now: float) -> str:
    """Return what limits the requests on a replica: a configured, a reported or a learned limit."""
    if state.spec.max_num_seqs is not None:
        return f"{state.spec.max_num_seqs} (configured)"
    learned = state.learned_limit
    if learned is None:
        size = None if state.learned.batch is None else state.learned.batch.size
        return "its queue (reported)" if size is None else f"{size} and its queue (reported)"
    if learned.limit is None:
        return f"no limit seen (at most {learned.window:.0f} unstarted)"
    limited = "unstarted" if learned.counts_unstarted else "in flight"
    evidence = f"starts were {learned.delay_s:.1f} s late" if learned.delay_s else "it rejected a request"
    since = time_text(time() - (now - learned.since))
    return f"{learned.limit} {limited}, learned {since} ({evidence})"


def overview(
    status: Mapping[str, Any], queue: Mapping[str, Any], activity: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the overview of one scheduler; `queue` has at most `SUB_QUEUES_SHOWN` sub-queues."""
    replicas = [_replica(name, each) for name, each in status["replicas"].items()]
    replicas += [
        {**_replica(one["replica"], {**_DOWN, "pool": pool["pool"]}), "reason": one["reason"]}
        for pool in status["endpoints"]
        for one in pool["down"]
        if one["replica"] not in status["replicas"]
    ]
    replicas.sort(key=lambda each: (each["state"] == "ready", each["pool"], each["replica"]))
    return {
        **{name: each for name, each in status.items() if name not in ("replicas", "pools", "endpoints")},
        **{name: each for name, each in queue.items() if name not in ("served", "settings", "waiting")},
        "waiting_requests": queue["waiting"],
        "served": {priority: _most_served(counters) for priority, counters in queue["served"].items()},
        "pools": [_pool(name, replicas) for name in status["pools"]],
        "replicas": replicas[:_MAX_REPLICAS],
        "replicas_omitted": len(replicas[_MAX_REPLICAS:]),
        "activity": activity,
    }


_SLOWEST_OF_S = 60.0
# More would delay grants by milliseconds.
_SLOWEST_OF = 2_000
_SLOWEST_SHOWN = 10


def slowest(history: RequestHistory, now: float) -> list[dict[str, Any]]:
    """Return the requests that ended in the last minute with the latest first token, the slowest first.

    Of answers that are not streamed, the queue time counts.
    """
    recent = islice(history.ended_since(now - _SLOWEST_OF_S), _SLOWEST_OF)
    found = [(_first_token_s(known), known) for known in recent]
    return [
        {
            "request_id": known.request_id,
            "tenant": known.request.tenant,
            "class": known.request.priority.value,
            "outcome": known.conclude.conclusion.outcome.value if known.conclude is not None else "",
            "pool": known.pool,
            "ended_s_ago": now - known.ended_at,
            "queue_s": known.wait_s,
            "ttft_s": seconds if _is_streamed(known) else None,
            "total_s": known.ended_at - known.arrived_at,
        }
        for seconds, known in nlargest(_SLOWEST_SHOWN, found, key=lambda each: each[0])
    ]


def _is_streamed(known: HistoryRecord) -> bool:
    times = known.times
    return times is not None and times.first_token_s is not None


def _first_token_s(known: HistoryRecord) -> float:
    times = known.times
    if times is None or times.first_token_s is None:
        return known.wait_s or 0.0
    return times.read_s + times.earlier_s + times.grant_s + times.first_token_s


_PSEUDONYM_KEY = secrets.token_bytes(16)


def captured(history: RequestHistory) -> list[dict[str, Any]]:
    """Return the completed requests whose tokens an engine has counted, as lines of a trace, by arrival.

    The lines have the format of Mooncake's traces, and no text. Hashes of prompts are omitted, because they
    would confirm a guessed prompt.
    """
    counted = [
        (known, known.usage)
        for known in history.ended()
        if known.conclude is not None
        and known.conclude.conclusion.outcome is Outcome.COMPLETED
        and known.usage is not None
    ]
    counted.sort(key=lambda pair: pair[0].arrived_at)
    return [
        {
            "timestamp": round((known.arrived_at - counted[0][0].arrived_at) * 1e3, 3),
            "input_length": usage.prompt_tokens,
            "output_length": usage.output_tokens,
            "hash_ids": [],
            "tenant": _pseudonym(known.request.tenant),
            "priority": known.request.priority.value,
        }
        for known, usage in counted
    ]


# Between two pauses: about half a millisecond.
_LINES_PER_PART = 100


def captured_in_full(history: RequestHistory) -> Generator[None, None, list[dict[str, Any]]]:
    """Return all known requests as lines of a trace, by arrival; yield between parts.

    In addition to the fields of `captured`, lines have the names of tenants, outcomes and times. Requests
    that did not complete are included, and those that have not ended, whose outcome is None. Tokens that no
    engine has counted are estimates for prompts, and 0 for outputs.
    """
    lines: list[dict[str, Any]] = []
    known = sorted((*history.ended(), *history.open()), key=lambda each: each.arrived_at)
    for each in known:
        if len(lines) % _LINES_PER_PART == 0:
            yield
        lines.append(_full_line(each, known[0].arrived_at))
    return lines


def _full_line(known: HistoryRecord, start: float) -> dict[str, Any]:
    usage, last, ended = known.usage, known.last, known.conclude
    expected = last.prompt_tokens if last is not None else 0
    return {
        "timestamp": round((known.arrived_at - start) * 1e3, 3),
        "input_length": usage.prompt_tokens if usage is not None else expected,
        "output_length": usage.output_tokens if usage is not None else 0,
        "hash_ids": [],
        "tenant": known.request.tenant,
        "priority": known.request.priority.value,
        "arrived_at": known.arrived_unix_s,
        "outcome": ended.conclusion.outcome.value if ended is not None else None,
        "pool": known.pool,
        "replica": last.dispatch.replica_id if last is not None else "",
        "cached_length": usage.cached_tokens if usage is not None else 0,
        "queue_s": known.wait_s,
        "ttft_s": _first_token_s(known) if _is_streamed(known) else None,
        "total_s": known.ended_at - known.arrived_at if ended is not None else None,
        "causes_s": {cause.value: ns / 1e9 for cause, ns in known.waited.causes.items()},
    }


def _pseudonym(tenant: str) -> str:
    """Return a pseudonym of a tenant, stable for the life of this process."""
    return "t" + hashlib.blake2b(tenant.encode(), key=_PSEUDONYM_KEY, digest_size=6).hexdigest()


# A remote endpoint that is down is no replica of the scheduler, and adds nothing to its pool's budget.
_DOWN = {"state": "down", "in_flight": 0, "report": None, "max_num_seqs": None, "budget_tokens": 0}


def _replica(name: str, shown: Mapping[str, Any]) -> dict[str, Any]:
    report = shown["report"] or {}
    return {
        "replica": name,
        "pool": shown["pool"],
        "state": shown["state"],
        "in_flight": shown["in_flight"],
        "limit": shown.get("limit"),
        "running": report.get("running"),
        "waiting_in_engine": report.get("waiting"),
        "max_num_seqs": shown["max_num_seqs"],
        "kv_usage_ratio": report.get("kv_usage_ratio"),
        "tpot_s": report.get("tpot_s"),
        "max_model_len": shown.get("max_model_len"),
        "peak_tokens": shown.get("peak_tokens", 0),
        "budget_tokens": shown.get("budget_tokens"),
        "pending_prefill_tokens": shown.get("pending_prefill_tokens", 0),
    }


def replica_state(shown: Mapping[str, Any]) -> str:
    """Return the most important condition of a replica, from the rest of its document."""
    report = shown["report"]
    if shown["stale"]:
        return "stale"
    if report is None:
        return "no report yet"
    if report["draining"]:
        return "draining"
    if shown.get("suspended"):
        return "suspended"
    if shown.get("hangs"):
        return "hangs"
    return "gated" if shown.get("gated") else "ready"


_SUMMED = ("in_flight", "peak_tokens", "waiting_in_engine", "running")


def _pool(name: str, replicas: list[dict[str, Any]]) -> dict[str, Any]:
    members = [each for each in replicas if each["pool"] == name]
    budgets = [each["budget_tokens"] for each in members]
    used = [each["kv_usage_ratio"] for each in members if each["kv_usage_ratio"] is not None]
    return {
        "pool": name,
        "replicas": len(members),
        "ready": sum(each["state"] in ("ready", "gated") for each in members),
        **{figure: sum(each[figure] or 0 for each in members) for figure in _SUMMED},
        "budget_tokens": None if None in budgets else sum(budgets),
        "kv_usage_ratio": sum(used) / len(used) if used else None,
    }


def most_costly(costs: Mapping[str, Any]) -> dict[str, Any]:
    """Return the costs with the most expensive rows only; they are sorted."""
    rows = costs["rows"]
    return {**costs, "rows": rows[:_MAX_TENANTS], "omitted": len(rows[_MAX_TENANTS:])}


def _most_served(counters: Mapping[str, float]) -> dict[str, float]:
    shown = sorted(counters.items(), key=lambda each: -each[1])[:_MAX_TENANTS]
    return dict(shown)
