"""Two lines about a running application, from its metrics: where it is and what it has, what it does."""

import time
import urllib.error
import urllib.request
from collections import defaultdict, deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample

_TIMEOUT_S = 2.0
# Rates and waits are those of so many looks, so that a quiet moment does not hide what has just been.
_LOOKS = 6
_CONCLUDED = "ewsjf_requests_concluded_total"
_WAIT = "ewsjf_queue_wait_seconds_bucket"
_REPLICAS = "ewsjf_pool_replicas"
_RUNNING, _WAITING = "ewsjf_requests_in_flight", "ewsjf_requests_waiting"
# States of replicas that work; the others are named.
_WORKING = ("open", "saturated")
_MOST_MODELS = 3


@dataclass(slots=True)
class _Look:
    """What a page says.

    Attributes:
        concluded: by outcome, since the start.
        waits: requests that waited up to a bound, since the start, by the bound in seconds.
        replicas: by model, pool and state.
    """

    at: float
    running: float = 0.0
    waiting: float = 0.0
    concluded: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    waits: dict[float, float] = field(default_factory=lambda: defaultdict(float))
    replicas: dict[str, dict[str, dict[str, float]]] = field(
        default_factory=lambda: defaultdict(lambda: defaultdict(lambda: defaultdict(float)))
    )


class LiveView:
    """Reads `/metrics` and tells what changed lately.

    Args:
        url: of the application.
        api_key: that of an admin, where the application asks for keys.
    """

    def __init__(self, url: str, api_key: str | None = None) -> None:
        headers = {"authorization": f"Bearer {api_key}"} if api_key else {}
        self._url = url
        # The address is that of our own configuration.
        self._request = urllib.request.Request(f"{url}/metrics", headers=headers)  # noqa: S310
        self._looks: deque[_Look] = deque(maxlen=_LOOKS)

    def text(self) -> str:
        """Address and replicas of each pool; then requests, their rate and their waits.

        Says so when the application does not answer.
        """
        place = f"{self._url}/v1"
        try:
            with urllib.request.urlopen(self._request, timeout=_TIMEOUT_S) as answer:  # noqa: S310 - as above
                page = answer.read().decode("utf-8", "replace")
        except urllib.error.HTTPError as exc:
            asks = exc.code in (401, 403)
            return f"{place}  {'its metrics need the key of an admin' if asks else f'answers {exc.code}'}"
        except OSError as exc:
            return f"{place}  does not answer: {exc}"
        look = _look(page, time.monotonic())
        self._looks.append(look)
        pools = _pools(look.replicas)
        return f"{place}{'  ' if pools else ''}{pools}\n{_traffic(self._looks[0], look)}"


def _look(page: str, now: float) -> _Look:
    look = _Look(now)
    for sample in _samples(page):
        labels, value = sample.labels, sample.value
        if sample.name == _RUNNING:
            look.running += value
        elif sample.name == _WAITING:
            look.waiting += value
        elif sample.name == _CONCLUDED:
            look.concluded[labels.get("outcome", "")] += value
        elif sample.name == _WAIT:
            look.waits[float(labels["le"])] += value
        elif sample.name == _REPLICAS:
            look.replicas[labels["model"]][labels["pool"]][labels["state"]] += value
    return look


def _samples(page: str) -> Iterator[Sample]:
    """Those that are looked at, of a page that may have thousands of others."""
    wanted = (_CONCLUDED, _WAIT, _REPLICAS, _RUNNING, _WAITING)
    lines = "".join([f"{line}\n" for line in page.splitlines() if line.startswith(wanted)])
    for family in text_string_to_metric_families(lines):
        yield from family.samples


def _pools(replicas: Mapping[str, Mapping[str, Mapping[str, float]]]) -> str:
    """Such as `short 2, long 1 (1 draining)`; the model's name stands before where there are several."""
    told = [
        (f"{model}: " if len(replicas) > 1 else "")
        + ", ".join(f"{pool} {_states(states)}" for pool, states in pools.items())
        for model, pools in replicas.items()
    ]
    more = f"; {len(told) - _MOST_MODELS} models more" if len(told) > _MOST_MODELS else ""
    return "; ".join(told[:_MOST_MODELS]) + more


def _states(states: Mapping[str, float]) -> str:
    working = sum(states.get(state, 0.0) for state in _WORKING)
    others = [f"{count:.0f} {state}" for state, count in states.items() if count and state not in _WORKING]
    return f"{working:.0f}" + (f" ({', '.join(others)})" if others else "")


def _traffic(before: _Look, now: _Look) -> str:
    """Such as `3 running, 1 waiting, 2.5 requests/s, waits: half <= 0.01 s, 95% <= 0.5 s, 120 so far`."""
    passed_s = now.at - before.at
    # A scheduler that was replaced begins to count anew.
    lately = {name: max(0.0, count - before.concluded[name]) for name, count in now.concluded.items()}
    refused = sum(count for name, count in lately.items() if name.startswith(("rejected", "expired")))
    rates = ((sum(lately.values()), "requests"), (refused, "refused"), (lately.get("failed", 0.0), "failed"))
    told = [f"{now.running:.0f} running, {now.waiting:.0f} waiting"]
    for count, word in rates:
        if count or word == "requests":
            told.append(f"{count / passed_s if passed_s else 0.0:.1f} {word}/s")
    if waits := _waits(before.waits, now.waits):
        told.append(waits)
    return ", ".join([*told, f"{sum(now.concluded.values()):.0f} so far"])


def _waits(before: Mapping[float, float], now: Mapping[float, float]) -> str:
    """Within which time half, and nearly all, left the queue; empty when nothing did."""
    counts = [(bound, now[bound] - before.get(bound, 0.0)) for bound in sorted(now)]
    total = counts[-1][1] if counts else 0.0
    if total <= 0:
        return ""
    half, most = (next(bound for bound, count in counts if count >= total * share) for share in (0.5, 0.95))
    return f"waits: half <= {half:g} s, 95% <= {most:g} s"
