"""Terminal output of `serve`: live status of the application, and progress lines."""

import contextlib
import sys
import time
from collections import defaultdict, deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample
from rich.console import Console as RichConsole
from rich.status import Status
from rich.text import Text

from serve_app.cli.command import program
from serve_app.cli.http_client import ConnectionFailedError, request
from serve_app.cli.serve.messages import Progress

# -- live status: two lines from the application's metrics ---------------------------------------------------


_TIMEOUT_S = 2.0
# Number of scrapes that rates and waits cover, so that a quiet moment does not hide recent traffic.
_MAX_SCRAPES = 6
_CONCLUDED = "ewsjf_requests_concluded_total"
_WAIT = "ewsjf_queue_wait_seconds_bucket"
_REPLICAS = "ewsjf_pool_replicas"
_RUNNING, _WAITING = "ewsjf_requests_in_flight", "ewsjf_requests_waiting"
# States of working replicas; the others are shown by name.
_WORKING = ("open", "saturated")
_MAX_MODELS = 3


@dataclass(slots=True)
class _Scrape:
    """Values of one scrape.

    Attributes:
        concluded: requests by outcome, since the start.
        waits: cumulative requests by upper bound of their queue time in seconds, since the start.
        replicas: replicas by model, pool and state.
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
    """Live status, computed from changes of `/metrics`.

    Args:
        api_key: an admin key, if the application requires keys.
    """

    def __init__(self, url: str, api_key: str | None = None) -> None:
        self._url = url
        self._api_key = api_key
        self._scrapes: deque[_Scrape] = deque(maxlen=_MAX_SCRAPES)

    def text(self) -> str:
        """Return address and replicas per pool, then requests, their rate and their queue time.

        If the application does not answer, the text is the error.
        """
        place = f"{self._url}/v1"
        try:
            answer = request(f"{self._url}/metrics", self._api_key, timeout_s=_TIMEOUT_S)
        except ConnectionFailedError as exc:
            return f"{place}  does not respond: {exc}"
        if answer.is_denied:
            return f"{place}  /metrics requires an admin key"
        if not answer.is_success:
            return f"{place}  /metrics returned {answer.status}"
        scrape = _parse_scrape(answer.text, time.monotonic())
        self._scrapes.append(scrape)
        pools = _pools(scrape.replicas)
        return f"{place}{'  ' if pools else ''}{pools}\n{_traffic(self._scrapes[0], scrape)}"


def _parse_scrape(page: str, now: float) -> _Scrape:
    scrape = _Scrape(now)
    for sample in _samples(page):
        labels, value = sample.labels, sample.value
        if sample.name == _RUNNING:
            scrape.running += value
        elif sample.name == _WAITING:
            scrape.waiting += value
        elif sample.name == _CONCLUDED:
            scrape.concluded[labels.get("outcome", "")] += value
        elif sample.name == _WAIT:
            scrape.waits[float(labels["le"])] += value
        elif sample.name == _REPLICAS:
            scrape.replicas[labels["model"]][labels["pool"]][labels["state"]] += value
    return scrape


def _samples(page: str) -> Iterator[Sample]:
    """Yield the samples of interest from a page that may have thousands of others."""
    wanted = (_CONCLUDED, _WAIT, _REPLICAS, _RUNNING, _WAITING)
    lines = "".join([f"{line}\n" for line in page.splitlines() if line.startswith(wanted)])
    for family in text_string_to_metric_families(lines):
        yield from family.samples


def _pools(replicas: Mapping[str, Mapping[str, Mapping[str, float]]]) -> str:
    """Format replicas as `short 2, long 1 (1 draining)`, with the model's name if there are several."""
    texts = [
        (f"{model}: " if len(replicas) > 1 else "")
        + ", ".join(f"{pool} {_states(states)}" for pool, states in pools.items())
        for model, pools in replicas.items()
    ]
    more = f"; {len(texts) - _MAX_MODELS} more models" if len(texts) > _MAX_MODELS else ""
    return "; ".join(texts[:_MAX_MODELS]) + more


def _states(states: Mapping[str, float]) -> str:
    working = sum(states.get(state, 0.0) for state in _WORKING)
    others = [f"{count:.0f} {state}" for state, count in states.items() if count and state not in _WORKING]
    return f"{working:.0f}" + (f" ({', '.join(others)})" if others else "")


def _traffic(before: _Scrape, now: _Scrape) -> str:
    """Format e.g. `3 running, 1 waiting, 2.5 requests/s, queue time: p50 <= 1 s, p95 <= 2 s, 120 total`."""
    passed_s = now.at - before.at
    # Counters restart at 0 when a scheduler is replaced.
    recent = {name: max(0.0, count - before.concluded[name]) for name, count in now.concluded.items()}
    rejected = sum(count for name, count in recent.items() if name.startswith(("rejected", "expired")))
    rates = (
        (sum(recent.values()), "requests"),
        (rejected, "rejected"),
        (recent.get("failed", 0.0), "failed"),
    )
    texts = [f"{now.running:.0f} running, {now.waiting:.0f} waiting"]
    for count, word in rates:
        if count or word == "requests":
            texts.append(f"{count / passed_s if passed_s else 0.0:.1f} {word}/s")
    if waits := _waits(before.waits, now.waits):
        texts.append(waits)
    return ", ".join([*texts, f"{sum(now.concluded.values()):.0f} total"])


def _waits(before: Mapping[float, float], now: Mapping[float, float]) -> str:
    """Format the bounds within which 50 % and 95 % of the requests left the queue; empty if none did."""
    counts = [(bound, now[bound] - before.get(bound, 0.0)) for bound in sorted(now)]
    total = counts[-1][1] if counts else 0.0
    if total <= 0:
        return ""
    half, most = (next(bound for bound, count in counts if count >= total * share) for share in (0.5, 0.95))
    return f"queue time: p50 <= {half:g} s, p95 <= {most:g} s"


# -- progress: steps with their times, how to use the application, and the drain -----------------------------
#
# On a terminal the current step is one line that is updated. Otherwise each line is written once, for logs.


_STEPS = {
    "ray": "Ray and Ray Serve",
    "application": "application",
    "engines": "engines",
}
# Interval of repeated lines during a long step, without a terminal.
_REPEAT_S = 15.0
_WIDTH = 34


@dataclass(frozen=True, slots=True, kw_only=True)
class ConnectionInfo:
    """Connection details of an application that is ready.

    Attributes:
        listen_address: listen address of the configuration, shown if it differs from `url`.
        requires_key: whether clients need a key.
        output: file with the output of Ray and Ray Serve.
        key_file: file with the application's admin key.
        ray_token: file with the token of Ray; empty for that of `ray get-auth-token`.
    """

    url: str
    listen_address: str
    models: Sequence[str]
    requires_key: bool
    logs: str
    output: str
    key_file: str
    drain_s: float
    dashboard: str | None
    ray_token: str


class _Output(RichConsole):
    """Console that survives a closed output, for which Rich would end the program."""

    def on_broken_pipe(self) -> None:
        """Discard all further output."""
        self.quiet = True


class Console:
    """Output on standard error. A closed terminal does not stop the application."""

    def __init__(self) -> None:
        self._rich = _Output(file=sys.stderr, highlight=False, soft_wrap=True)
        self._began_at = time.monotonic()
        self._step = ""
        self._step_at = self._began_at
        self._last_printed_at = self._began_at
        self._printed: set[str] = set()
        self._status: Status | None = None

    @property
    def elapsed_s(self) -> float:
        """Seconds since the command began."""
        return time.monotonic() - self._began_at

    def line(self, text: str, style: str = "") -> None:
        """Print a permanent line."""
        with contextlib.suppress(OSError):
            self._rich.print(Text(text, style=style))

    def step(self, name: str) -> None:
        """Begin a step and end the previous one."""
        self.end_step()
        self._step, self._step_at = _STEPS.get(name, name), time.monotonic()
        self._last_printed_at = self._step_at
        self._show(f"{self._step} ...")

    def end_step(self) -> None:
        """End the current step."""
        self._hide()
        if self._step:
            self._done(self._step, time.monotonic() - self._step_at)
        self._step = ""

    def progress(self, progress: Progress) -> None:
        """Print deployments that became ready, each once, and show the others."""
        now = time.monotonic()
        for name in progress.ready:
            if name not in self._printed:
                self._printed.add(name)
                self._done(f"  {name} ready", now - self._step_at)
        if not progress.lines:
            return
        text = f"{', '.join(progress.lines)}, {now - self._step_at:.0f} s"
        self._show(text)
        if not self._rich.is_terminal and now - self._last_printed_at >= _REPEAT_S:
            self._last_printed_at = now
            self.line(f"  waiting: {text}")

    def ready(self, info: ConnectionInfo) -> None:
        """Print how to use the application."""
        self.end_step()
        first = info.models[0]
        key = " -H 'authorization: Bearer YOUR_KEY'" if info.requires_key else ""
        body = f'{{"model": "{first}", "messages": [{{"role": "user", "content": "Hello"}}]}}'
        self.line(f"Ready after {self.elapsed_s:.1f} s.", "bold green")
        listening = "" if info.listen_address == info.url else f"   (listening on {info.listen_address})"
        self.line(f"  address    {info.url}/v1{listening}")
        self.line(f"  models     {', '.join(info.models)}")
        curl = f"curl {info.url}/v1/chat/completions -H 'content-type: application/json'{key} -d '{body}'"
        self.line(f"  try        {curl}")
        self.line(f"  dashboard  {info.url}/dashboard   (key: {info.key_file})")
        self.line(f"  status     {program()} status --url {info.url}")
        self.line(f"  logs       {info.logs}")
        self.line(f"  output     {info.output}   (Ray and Ray Serve)")
        if info.dashboard:
            self.line(f"  Ray        {info.dashboard}   (token: {info.ray_token or 'ray get-auth-token'})")
        self.line(
            f"  stop       Ctrl-C: in-flight requests have {info.drain_s:g} s to complete; "
            "again to stop immediately"
        )

    def live(self, text: str) -> None:
        """Show the live status, on a terminal only."""
        self._show(text)

    def draining(self, open_requests: int, remaining_s: float) -> None:
        """Show the progress of a drain."""
        requests = "1 request" if open_requests == 1 else f"{open_requests} requests"
        text = f"stopping: {requests} in flight, {remaining_s:.0f} s left; Ctrl-C to stop immediately"
        self._show(text)
        now = time.monotonic()
        if not self._rich.is_terminal and now - self._last_printed_at >= _REPEAT_S / 3:
            self._last_printed_at = now
            self.line(text)

    def end(self) -> None:
        """Restore the terminal."""
        self._hide()

    def _done(self, what: str, seconds: float) -> None:
        self.line(f"{what:<{_WIDTH}} {seconds:6.1f} s")

    def _show(self, text: str) -> None:
        if not self._rich.is_terminal:
            return
        with contextlib.suppress(OSError):
            if self._status is None:
                self._status = self._rich.status(text, refresh_per_second=4)
                self._status.start()
            else:
                self._status.update(text)

    def _hide(self) -> None:
        status, self._status = self._status, None
        if status is not None:
            with contextlib.suppress(OSError):
                status.stop()
