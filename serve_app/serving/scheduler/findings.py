"""Findings about one model: what affects its clients now, and the next step.

They follow from the documents of `/debug/status` and `/debug/queue` alone. The dashboard and the command
`status` show them.
"""

import enum
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

Document = Mapping[str, Any]


class Severity(enum.IntEnum):
    """Severity of a finding, by its current effect on clients."""

    DOWN = 0
    """Requests are not served."""
    DEGRADED = 1
    """Requests are delayed, or some fail."""
    RISK = 2
    """Requests are not affected yet, or were affected in the past."""
    NOTE = 3
    """Unusual, without effect on requests."""

    @property
    def label(self) -> str:
        """The name as it is shown."""
        return self.name.lower()


@dataclass(frozen=True, slots=True)
class Finding:
    """A finding and the next step, one sentence each."""

    severity: Severity
    what: str
    next_step: str

    def as_json(self) -> dict[str, str]:
        """Return it as plain values."""
        return {"severity": self.severity.label, "what": self.what, "next_step": self.next_step}


def lost_scheduler(model: str, error: str = "no scheduler is connected") -> Finding:
    """Return the finding of a model whose scheduler does not respond."""
    return Finding(
        Severity.DOWN,
        f"model {model}: {error}; new requests are queued until it is back",
        "it is replaced automatically within seconds: check again, then see the logs of its scheduler",
    )


def check_scheduler(model: Document) -> Iterator[Finding]:
    """Yield a finding if a model's scheduler does not respond or has ended."""
    name = model["model"]
    if "error" in model:
        yield lost_scheduler(name, model["error"])
    elif model["ended"]:
        yield Finding(
            Severity.DEGRADED,
            f"model {name}: its scheduler has ended: {model['ended']}",
            "another scheduler takes over automatically: check again in a few seconds",
        )


def check_reports(model: Document) -> Iterator[Finding]:
    """Yield a finding for replicas without a fresh load report, which receive no requests."""
    replicas = model["replicas"]
    late = sorted(name for name, each in replicas.items() if each["stale"] or each["report"] is None)
    if not late:
        return
    everyone = len(late) == len(replicas)
    yield Finding(
        Severity.DOWN if everyone else Severity.DEGRADED,
        f"model {model['model']}: {len(late)} of {len(replicas)} replicas have no recent load report, so "
        f"they receive no requests: {', '.join(late)}",
        "an engine that hangs is replaced after its health check: see its log and the load of its node",
    )


def check_hangs(model: Document) -> Iterator[Finding]:
    """Yield a finding for replicas that have requests and start no answers."""
    replicas = model["replicas"]
    hung = sorted(name for name, each in replicas.items() if each.get("state") == "hangs")
    if hung:
        yield Finding(
            Severity.DEGRADED,
            f"model {model['model']}: {len(hung)} of {len(replicas)} replicas do not answer their requests: "
            f"{', '.join(hung)}",
            "restart their servers if they hang: each receives no more than one request until it answers",
        )


def check_endpoints(model: Document) -> Iterator[Finding]:
    """Yield a finding for each remote endpoint that is down."""
    for each in endpoints_down(model):
        yield Finding(
            Severity.DEGRADED,
            f"model {model['model']}: {each}",
            "restart its server: it is used again as soon as it answers; or remove it with "
            "DELETE /admin/endpoints",
        )


def check_asleep(model: Document) -> Iterator[Finding]:
    """Yield a finding for each pool with remote endpoints that sleep."""
    # A scheduler or watcher of an older release does not report this.
    for pool in model.get("endpoints", ()):
        if asleep := pool.get("asleep"):
            more = f" and {len(asleep) - _MAX_DOWN} more" if len(asleep) > _MAX_DOWN else ""
            yield Finding(
                Severity.NOTE,
                f"model {model['model']}: {len(asleep)} of {pool['endpoints']} endpoints of pool "
                f"{pool['pool']} sleep and receive no requests: {', '.join(asleep[:_MAX_DOWN])}{more}",
                "POST /wake_up of a server wakes it up: it is used as soon as it is awake",
            )


def check_sources(model: Document) -> Iterator[Finding]:
    """Yield a finding for each source of endpoints that cannot be read."""
    for each in unread_sources(model):
        yield Finding(
            Severity.DEGRADED,
            f"model {model['model']}: {each}",
            "correct `endpoints` of the pool, or what the message names: the source is read again every few "
            "seconds, and its last endpoints remain",
        )


# Fewer requests may all be of one conversation.
_MIN_PREFIX_REQUESTS = 50
# Of all prompt tokens. Below this, the error hardly affects the choice of a replica.
_MAX_PREFIX_ERROR = 0.2
# Tokens per request. Engines cache blocks of 16 tokens, and the index has blocks of 128, or of up to twice as
# many if tokens are short. A smaller difference does not show that the index is wrong.
_PREFIX_RESOLUTION = 256


def check_prefixes(model: Document) -> Iterator[Finding]:
    """Yield a finding per pool whose engines have cached much more or less than the prefix index predicts."""
    # A scheduler of an older release does not report this.
    for pool, recent in model.get("prefix", {}).items():
        predicted, reported = recent["predicted_tokens"], recent["reported_tokens"]
        prompt, error = recent["prompt_tokens"], abs(predicted - reported)
        least = max(_MAX_PREFIX_ERROR * prompt, _PREFIX_RESOLUTION * recent["requests"])
        if recent["requests"] < _MIN_PREFIX_REQUESTS or error <= least:
            continue
        yield Finding(
            Severity.NOTE,
            f"model {model['model']}: the prefix index is wrong for pool {pool}: of {prompt:,.0f} recent "
            f"prompt tokens, it expected {predicted:,.0f} in the cache, and engines reported {reported:,.0f}",
            "engines that other clients use, or whose cache is off or small, forget prompts: compare "
            "vllm:prefix_cache_hits_total of each"
            if predicted > reported
            else "the engines cache more than the gateways know: let all clients use them",
        )


def check_pools(model: Document) -> Iterator[Finding]:
    """Yield a finding per pool without replicas while another pool of the model serves its requests."""
    has = {replica["pool"] for replica in model["replicas"].values()}
    for pool in model.get("pools", ()):
        if has and pool not in has:
            yield Finding(
                Severity.DEGRADED,
                f"model {model['model']}: pool {pool} has no replica: its requests wait or spill",
                "replicas that start are used automatically; if "
                "none becomes ready, see the logs of its engine",
            )


def check_closed_pools(model: Document) -> Iterator[Finding]:
    """Yield a finding per pool of which no replica accepts requests, unless all are late: `check_reports`."""
    states: dict[str, list[str]] = {}
    for replica in model["replicas"].values():
        state = "open" if replica.get("open") else replica.get("state", "")
        states.setdefault(replica["pool"], []).append(state)
    closed = {pool: found for pool, found in states.items() if _CLOSED.issuperset(found)}
    for pool, found in closed.items():
        if _LATE.issuperset(found):
            continue
        counts = ", ".join(f"{found.count(state)} {state}" for state in sorted(set(found)))
        yield Finding(
            Severity.DOWN if closed.keys() == states.keys() else Severity.DEGRADED,
            f"model {model['model']}: no replica of pool {pool} accepts requests ({counts})",
            "draining replicas stop, and the others fail or hang: see the logs of their engines; successors "
            "are used as soon as they are ready",
        )


def check_tuner(model: Document) -> Iterator[Finding]:
    """Yield a finding if the tuner is frozen."""
    frozen = (model.get("tuner") or {}).get("frozen")
    if frozen:
        yield Finding(
            Severity.NOTE,
            f"model {model['model']}: the tuner is {frozen}",
            "thaw it: ewsjf status --thaw-tuner",
        )


def check_decision_log(model: Document) -> Iterator[Finding]:
    """Yield a finding if the decision log has ended while the scheduler continues."""
    reason = model.get("decision_log_ended")
    if reason:
        yield Finding(
            Severity.NOTE,
            f"model {model['model']}: the decision log has ended: {reason}",
            "nothing is recorded until the scheduler restarts: raise max_events, or free disk space",
        )


def check_observers(model: Document) -> Iterator[Finding]:
    """Yield a finding if observers of the scheduler failed, so that what they show is incomplete."""
    # A scheduler of an older release does not report this.
    for observer, count in model.get("observer_errors", {}).items():
        yield Finding(
            Severity.RISK,
            f"model {model['model']}: {observer} failed on {count:,} events since the scheduler started, so "
            "what it records is incomplete; requests are not affected",
            "see `event=observer_failed` in the scheduler's log, and report the traceback that follows",
        )


_LATE = frozenset({"stale", "no report yet"})
_CLOSED = _LATE | {"draining", "suspended", "hangs"}
_NEARLY_FULL_RATIO = 0.8
_NEAR_TIMEOUT_RATIO = 0.5


def check_queue_length(queue: Document) -> Iterator[Finding]:
    """Yield a finding if a queue is near its limit, above which requests are rejected with 429."""
    limit = queue.get("max_waiting")
    if limit is None or queue["waiting"] < _NEARLY_FULL_RATIO * limit:
        return
    full = queue["waiting"] >= limit
    rejected = "so requests are rejected with 429" if full else "beyond it, requests are rejected with 429"
    yield Finding(
        Severity.DEGRADED if full else Severity.RISK,
        f"model {queue['model']}: {queue['waiting']:,} requests are queued, and the limit is {limit:,}"
        f"{', ' if full else '; '}{rejected}",
        "add replicas (`plan` computes how many) or reduce the load; a longer queue only adds queue time",
    )


def check_longest_wait(queue: Document) -> Iterator[Finding]:
    """Yield a finding per class whose longest queue time is near its timeout."""
    timeouts = queue.get("queue_timeout_s") or {}
    reported: set[str] = set()
    # The longest queue time comes first, so one finding per class is enough.
    for sub_queue in sorted(queue["sub_queues"], key=lambda each: -each["wait_s"]):
        priority = sub_queue["priority"]
        timeout_s = timeouts.get(priority)
        if timeout_s is None or priority in reported or sub_queue["wait_s"] < _NEAR_TIMEOUT_RATIO * timeout_s:
            continue
        reported.add(priority)
        yield Finding(
            Severity.DEGRADED,
            f"model {queue['model']}: a request of class {priority} has been queued for "
            f"{sub_queue['wait_s']:.0f} s of at most {timeout_s:.0f} s ({sub_queue['reason']})",
            "`status` shows what is queued and why; add replicas of its pool, or raise the class's share",
        )


def check_growth(queue: Document) -> Iterator[Finding]:
    """Yield a finding if a queue has grown for 20 s."""
    before, heads = queue.get("grown_from"), queue["sub_queues"]
    if before is not None and heads:
        oldest = max(heads, key=lambda each: each["wait_s"])
        yield Finding(
            Severity.RISK,
            f"model {queue['model']}: the queue has grown for 20 s, from {before:,} to {queue['waiting']:,} "
            f"requests; the oldest one waits because {oldest['reason']}",
            "restore replicas that accept nothing, add some (`plan` computes how many), or reduce the load",
        )


# Nearly the most that the scheduler lets a floor fall behind.
_FLOOR_MISSED_S = 8.0


def check_floors(queue: Document) -> Iterator[Finding]:
    """Yield a finding if tenants or classes get less than their floors."""
    # A scheduler of an older release does not report this.
    floors = queue.get("floors") or {"subjects": ()}
    missed = [each for each in floors["subjects"] if each["behind_s"] >= _FLOOR_MISSED_S]
    if missed:
        first = missed[0]
        yield Finding(
            Severity.DEGRADED,
            f"model {queue['model']}: {len(missed)} floors are not kept: {first['subject']} gets "
            f"{first['received_tokens_per_s']:,.0f} of {first['floor_tokens_per_s']:,.0f} tokens/s; all "
            f"floors add up to {floors['tokens_per_s']:,.0f}, and the fleet serves "
            f"{floors['served_tokens_per_s']:,.0f}",
            "lower floors, so that they add up to nine tenths of what the fleet serves, or add replicas",
        )


def check_saturation(model: Document) -> Iterator[Finding]:
    """Yield a finding per pool for which requests wait while none of its replicas accepts more."""
    # A scheduler of an older release does not report this.
    for pool, waiting in model.get("waiting_by_pool", {}).items():
        replicas = {name: each for name, each in model["replicas"].items() if each["pool"] == pool}
        full = [name for name, each in replicas.items() if each["state"] in ("ready", "gated")]
        if not waiting or not full or any(each["open"] for each in replicas.values()):
            continue
        counts = Counter(each["state"].replace("ready", "at the limit") for each in replicas.values())
        states = ", ".join(f"{count} {state}" for state, count in counts.items())
        yield Finding(
            Severity.RISK,
            f"model {model['model']}: {waiting:,} requests wait for pool {pool}, and none of its "
            f"{len(replicas)} replicas accepts more ({states}); limit of {full[0]}: "
            f"{replicas[full[0]]['limit']}",
            "if it lasts, add replicas: `plan` computes how many, and `autoscaling` adds them automatically",
        )


_MIN_PREDICTIONS = 20
_MAX_PREDICTION_ERROR = 0.5


def check_predictions(model: Document) -> Iterator[Finding]:
    """Yield a finding per class whose predicted queue times are off by more than half of the actual ones."""
    # A scheduler of an older release does not report this.
    for priority, recent in model.get("predictions", {}).items():
        error_s, waited_s = recent["error_s"], recent["waited_s"]
        if recent["requests"] < _MIN_PREDICTIONS or error_s <= _MAX_PREDICTION_ERROR * waited_s:
            continue
        yield Finding(
            Severity.RISK,
            f"model {model['model']}: predicted queue times of class {priority} are off by {error_s:.1f} s "
            f"on average: {recent['predicted_s']:.1f} s predicted, and {waited_s:.1f} s waited "
            f"({recent['requests']:.0f} recent requests)",
            "they settle within minutes after a change of load or replicas; until then, early rejections "
            "and the predictions of `explain` are inaccurate",
        )


def time_text(unix_s: float) -> str:
    """Return a time as text, without the date if it is today."""
    at, now = datetime.fromtimestamp(unix_s, UTC), datetime.now(UTC)
    return f"{at:%H:%M:%S} UTC" if at.date() == now.date() else f"{at:%Y-%m-%d %H:%M:%S} UTC"


# Endpoints that are named one by one.
_MAX_DOWN = 5


def endpoints_down(model: Document) -> Iterator[str]:
    """Yield the first endpoints of each pool that are down, with the reason, and how many others are."""
    # A scheduler of an older release does not report this.
    for pool in model.get("endpoints", ()):
        number, all_of_them = len(pool["down"]), pool["endpoints"]
        for one in pool["down"][:_MAX_DOWN]:
            reason = one["reason"] if one["url"] in one["reason"] else f"{one['url']}: {one['reason']}"
            yield (
                f"{number} of {all_of_them} endpoints of pool {pool['pool']} down: {reason}, since "
                f"{time_text(one['since'])}"
            )
        if (more := number - _MAX_DOWN) > 0:
            yield f"{more} more endpoints of pool {pool['pool']} down: GET /admin/endpoints lists them"


def unread_sources(model: Document) -> Iterator[str]:
    """Yield the sources of endpoints that cannot be read, with the reason."""
    # A scheduler or watcher of an older release does not report this.
    for pool in model.get("endpoints", ()):
        for one in pool.get("unread_sources", ()):
            yield f"pool {pool['pool']} cannot read {one['source']}: {one['reason']}"


_CHECKS: tuple[Callable[[Document], Iterator[Finding]], ...] = (
    check_scheduler,
    check_pools,
    check_closed_pools,
    check_endpoints,
    check_asleep,
    check_sources,
    check_prefixes,
    check_reports,
    check_hangs,
    check_saturation,
    check_predictions,
    check_tuner,
    check_decision_log,
    check_observers,
)


def status_findings(status: Document) -> Iterator[Finding]:
    """Yield the findings from a model's document of `/debug/status`."""
    for check in (check_scheduler,) if "error" in status else _CHECKS:
        yield from check(status)


def queue_findings(queue: Document) -> Iterator[Finding]:
    """Yield the findings from a model's document of `/debug/queue`."""
    yield from check_queue_length(queue)
    yield from check_longest_wait(queue)
    yield from check_growth(queue)
    yield from check_floors(queue)


def gateway_findings(page: Document) -> Iterator[Finding]:
    """Yield the findings about the gateway that answers, for `status`, from its page `/debug/status`."""
    # A gateway of an older release does not report this.
    if unknown := page.get("unknown_objectives"):
        named = ", ".join(f"{name} ({count:,})" for name, count in sorted(unknown.items()))
        yield Finding(
            Severity.RISK,
            f"requests name objectives that this gateway does not know, so these have no effect: {named}",
            f"add them to gateway.objectives; known: {', '.join(page['known_objectives'])}. If they are "
            "InferenceObjectives, see event=discovery_failed in the log of the gateway",
        )


def findings_document(status: Document, queue: Document) -> list[dict[str, str]]:
    """Return all findings of a model as plain values, the most severe first."""
    found = sorted([*status_findings(status), *queue_findings(queue)], key=lambda each: each.severity)
    return [each.as_json() for each in found]
