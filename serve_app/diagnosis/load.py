"""Who waits now: a queue that fills up, waits that come near their timeout, engines that take no more."""

from collections.abc import Iterator

from serve_app.diagnosis.inspection import Document
from serve_app.diagnosis.trouble import Severity, Trouble

_NEARLY_FULL = 0.8
_LATE = 0.5
# An engine with so much of its KV cache in use preempts before long.
_KV_FULL = 0.95


def queue_length(queue: Document) -> Iterator[Trouble]:
    """A queue near its limit; beyond that requests are refused with 429."""
    limit = queue.get("max_waiting")
    if limit is None or queue["waiting"] < _NEARLY_FULL * limit:
        return
    full = queue["waiting"] >= limit
    refused = "requests are refused with 429" if full else "beyond that requests are refused with 429"
    yield Trouble(
        Severity.DEGRADED if full else Severity.RISK,
        f"model {queue['model']}: {queue['waiting']:,} of at most {limit:,} requests wait, {refused}",
        "add replicas (`plan` says how many) or lower the load; a longer queue only waits longer",
    )


def longest_wait(queue: Document) -> Iterator[Trouble]:
    """The longest wait of each class against its timeout."""
    timeouts = queue.get("queue_timeout_s") or {}
    seen: set[str] = set()
    # The longest wait comes first.
    for sub_queue in sorted(queue["sub_queues"], key=lambda each: -each["wait_s"]):
        priority = sub_queue["priority"]
        timeout_s = timeouts.get(priority)
        if timeout_s is None or priority in seen or sub_queue["wait_s"] < _LATE * timeout_s:
            continue
        seen.add(priority)
        yield Trouble(
            Severity.DEGRADED,
            f"model {queue['model']}: a request of class {priority} has waited {sub_queue['wait_s']:.0f} s "
            f"of at most {timeout_s:.0f} s ({sub_queue['why']})",
            "`status` shows who waits and why; add replicas of that pool, or give the class a greater share",
        )


def saturation(model: Document) -> Iterator[Trouble]:
    """Requests wait, and no engine has room."""
    waiting = sum(model["waiting"].values())
    ready = [replica for replica in model["replicas"].values() if replica["report"] and not replica["stale"]]
    if not waiting or not ready or not all(_is_full(replica) for replica in ready):
        return
    yield Trouble(
        Severity.RISK,
        f"model {model['model']}: {waiting:,} requests wait, and all {len(ready)} replicas are full",
        "if it lasts, add replicas: `plan` says how many, `autoscaling` adds them by itself",
    )


def _is_full(replica: Document) -> bool:
    report = replica["report"]
    # A server may not tell some of these.
    waiting, running, kv_usage = (report[name] or 0 for name in ("waiting", "running", "kv_usage_ratio"))
    batch_is_full = running >= (replica.get("max_num_seqs") or float("inf"))
    return bool(waiting > 0 or batch_is_full or kv_usage >= _KV_FULL)
