"""Client of one run: requests at their times, and dialogues whose next turn follows the answer."""

import asyncio
import itertools
import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import aiohttp
import numpy as np

from experiments.common.load_test.open_loop import HEADERS, client_session, exchange
from experiments.common.load_test.response import ResponseParser
from experiments.common.processes import CpuMeter

MODEL = "m"
_TIMEOUT_S = 120.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Ask:
    """A request.

    Attributes:
        kind: name of its figures.
        at_s: seconds from the start of the run; in a dialogue, pause before it.
        priority: value of `x-priority`; empty for none.
    """

    kind: str
    messages: Sequence[Mapping[str, str]]
    output_tokens: int
    at_s: float = 0.0
    tenant: str = "default"
    priority: str = ""

    def body(self) -> bytes:
        """Return the body."""
        document = {
            "model": MODEL,
            "messages": self.messages,
            "max_tokens": self.output_tokens,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
            "user": self.tenant,
        }
        return json.dumps(document).encode()

    def headers(self) -> dict[str, str]:
        """Return the headers."""
        headers = {**HEADERS, "x-tenant": self.tenant}
        return {**headers, "x-priority": self.priority} if self.priority else headers


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """The requests of a run.

    Attributes:
        kinds: all kinds, in the order of tables.
        dialogues: played in parallel; each starts no turn after the end of the window.
        window: start and end of the measurement, in seconds from the start of the run.
    """

    kinds: Sequence[str]
    window: tuple[float, float]
    asks: Sequence[Ask] = ()
    dialogues: Sequence[Sequence[Ask]] = ()


@dataclass(frozen=True, slots=True)
class Answer:
    """An answer; times in seconds from the start of the run.

    Attributes:
        due_s: when the request should be sent.
        error: why it did not complete; empty if it did.
    """

    kind: str
    due_s: float
    first_s: float | None
    end_s: float
    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    error: str = ""


class Client:
    """Sends the requests of a plan to each URL in turn."""

    def __init__(self, urls: Sequence[str], session: aiohttp.ClientSession) -> None:
        self.answers: list[Answer] = []
        self._urls = itertools.cycle(urls)
        self._session = session
        self._start = time.monotonic()

    async def play(self, plan: Plan) -> None:
        """Send all requests, and wait for their answers."""
        async with asyncio.TaskGroup() as group:
            for dialogue in plan.dialogues:
                group.create_task(self._talk(dialogue, plan.window[1]))
            for ask in plan.asks:
                await self.until(ask.at_s)
                group.create_task(self._send(ask, ask.at_s))

    async def until(self, at_s: float) -> None:
        """Wait for a time of the run."""
        await asyncio.sleep(max(0.0, at_s - self._now_s()))

    async def _talk(self, dialogue: Sequence[Ask], end_s: float) -> None:
        for ask in dialogue:
            due_s = self._now_s() + ask.at_s
            if due_s >= end_s:
                return
            await self.until(due_s)
            await self._send(ask, due_s)

    async def _send(self, ask: Ask, due_s: float) -> None:
        parser, url = ResponseParser(), f"{next(self._urls)}/v1/chat/completions"
        try:
            async with asyncio.timeout(_TIMEOUT_S):
                await exchange(self._session, url, ask.body(), ask.headers(), parser)
        except TimeoutError:
            parser.fail(f"no answer after {_TIMEOUT_S:g} s", time.monotonic())
        first_at = parser.first_token_at
        self.answers.append(
            Answer(
                ask.kind,
                due_s,
                None if first_at is None else first_at - self._start,
                parser.finished_at - self._start,
                parser.prompt_tokens or 0,
                parser.cached_tokens or 0,
                parser.output_tokens or 0,
                parser.detail,
            )
        )

    def _now_s(self) -> float:
        return time.monotonic() - self._start


async def played(
    urls: Sequence[str], plan: Plan, meters: Mapping[str, CpuMeter], disturb: Callable[[], None]
) -> tuple[list[Answer], dict[str, float]]:
    """Play a plan; return its answers, and the cores that each meter's processes used in the window.

    Args:
        disturb: called after one third of the window.
    """
    start, end = plan.window
    async with client_session() as session:
        client = Client(urls, session)
        playing = asyncio.ensure_future(client.play(plan))
        asyncio.get_running_loop().call_later(start + (end - start) / 3, disturb)
        await client.until(start)
        before, began = await asyncio.to_thread(_cpu_s, meters), time.monotonic()
        await asyncio.wait([playing], timeout=end - start)
        after, seconds = await asyncio.to_thread(_cpu_s, meters), time.monotonic() - began
        await playing
    return client.answers, {name: (after[name] - before[name]) / seconds for name in meters}


def _cpu_s(meters: Mapping[str, CpuMeter]) -> dict[str, float]:
    return {name: sum(meter.read().values()) for name, meter in meters.items()}


def figures_of(
    plan: Plan, answers: Sequence[Answer], limits_s: Mapping[str, float], background: str
) -> dict[str, float | None]:
    """Return the figures of the requests that were due in the window.

    Args:
        limits_s: for the first token, by kind; kinds without one are in time if they complete.
        background: kind that does not count for `token_ms`.
    """
    start, end = plan.window
    sent = [one for one in answers if start <= one.due_s < end]
    good = [one for one in sent if not one.error]
    # A plan without arrivals ends early.
    seconds = min(end, max((one.end_s for one in answers), default=end)) - start
    in_time = [one for one in good if _ttft_s(one) <= limits_s.get(one.kind, float("inf"))]
    figures: dict[str, float | None] = {
        "completed_per_s": sum(start <= one.end_s < end and not one.error for one in answers) / seconds,
        "goodput_per_s": len(in_time) / seconds,
        "errors": len(sent) - len(good),
        "token_ms": _mean(
            [_token_ms(one) for one in good if one.kind != background and one.output_tokens > 1]
        ),
    }
    for kind in plan.kinds:
        mine = [one for one in good if one.kind == kind]
        first = [_ttft_s(one) for one in mine]
        prompt_tokens = sum(one.prompt_tokens for one in mine)
        figures |= {
            f"{kind}_ttft_mean_s": _mean(first),
            f"{kind}_ttft_p50_s": float(np.percentile(first, 50)) if first else None,
            f"{kind}_ttft_p99_s": float(np.percentile(first, 99)) if first else None,
            f"{kind}_cached_ratio": sum(one.cached_tokens for one in mine) / max(1, prompt_tokens),
            f"{kind}_tokens_per_s": sum(_tokens_in(one, start, end) for one in answers if one.kind == kind)
            / seconds,
            f"{kind}_service_per_s": sum(_service_in(one, start, end) for one in answers if one.kind == kind)
            / seconds,
        }
    return figures


def _ttft_s(answer: Answer) -> float:
    return (answer.end_s if answer.first_s is None else answer.first_s) - answer.due_s


def _token_ms(answer: Answer) -> float:
    first_s = answer.end_s if answer.first_s is None else answer.first_s
    return 1_000 * (answer.end_s - first_s) / (answer.output_tokens - 1)


def _tokens_in(answer: Answer, start: float, end: float) -> float:
    """Return the output tokens within the window, if they came at a steady pace."""
    if answer.first_s is None or answer.end_s <= answer.first_s:
        return 0.0
    inside_s = max(0.0, min(end, answer.end_s) - max(start, answer.first_s))
    return answer.output_tokens * inside_s / (answer.end_s - answer.first_s)


def _service_in(answer: Answer, start: float, end: float) -> float:
    """Return the service within the window, as fair shares and floors count it."""
    prefilled = answer.prompt_tokens - answer.cached_tokens
    was_prefilled = answer.first_s is not None and start <= answer.first_s < end
    return prefilled * was_prefilled + 2 * _tokens_in(answer, start, end)


def _mean(values: Sequence[float]) -> float | None:
    return float(np.mean(values)) if values else None
