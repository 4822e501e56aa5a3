"""The stages of a request's time, and what one in an engine consists of.

Stages are exact and add up to the whole time. Parts of a stage are what the engine tells of itself, if it
does; the rest is the way to it and back, with the reading of the request. Of an engine that tells nothing
only the prefill is known, as it usually takes: then the rest counts as a wait in the engine, and both are
estimates.
"""

from collections.abc import Iterator
from typing import Any

from serve_app.serving.channel.scheduler_client import EngineTimes, RequestTimes


def stages(times: RequestTimes | None, wait_s: float, prefill_s: float | None) -> list[dict[str, Any]]:
    """The stages in their order, in milliseconds.

    Args:
        times: as the gateway tells; None where it has not told any.
        wait_s: in the queue, as the scheduler knows.
        prefill_s: how long a prefill of this length usually takes; None where it was never sent to an engine.
    """
    told: list[dict[str, Any]] = []
    for name, seconds in _stages(times, wait_s):
        each = stage(name, seconds)
        if parts := list(_parts(name, seconds, times, prefill_s)):
            each["parts"] = parts
        told.append(each)
    return told


def stage(name: str, seconds: float) -> dict[str, Any]:
    """One stage, as it is told."""
    return {"stage": name, "ms": in_ms(seconds)}


def in_ms(seconds: float | None) -> float | None:
    """In milliseconds, to the microsecond."""
    return None if seconds is None else round(seconds * 1e3, 3)


def _stages(times: RequestTimes | None, wait_s: float) -> Iterator[tuple[str, float]]:
    if times is None:
        yield "queue", wait_s
        return
    yield "gateway", times.read_s
    yield "channel", times.grant_s - wait_s
    yield "queue", wait_s
    if times.engine_s is None:
        return
    if times.first_token_s is None:
        yield "engine", times.engine_s
    else:
        yield "until_first_token", times.first_token_s
        yield "generation", times.engine_s - times.first_token_s


def _parts(
    name: str, seconds: float, times: RequestTimes | None, prefill_s: float | None
) -> Iterator[dict[str, Any]]:
    told = times.engine if times is not None else None
    if told is not None and told.queue_s is not None and told.prefill_s is not None:
        yield from _told_parts(name, seconds, told)
    elif name == "until_first_token" and prefill_s is not None:
        prefill = min(seconds, prefill_s)
        yield {"part": "engine_queue", "ms": in_ms(seconds - prefill), "estimated": True}
        yield {"part": "prefill", "ms": in_ms(prefill), "estimated": True}


def _told_parts(name: str, seconds: float, told: EngineTimes) -> Iterator[dict[str, Any]]:
    named = [("engine_queue", told.queue_s), ("prefill", told.prefill_s)]
    if name == "engine" and told.generation_s is not None:
        named.append(("generation", told.generation_s))
    elif name != "until_first_token":
        return
    known = sum(each for _, each in named if each is not None)
    # Two clocks: what the engine tells may be a hair more than what the gateway saw.
    for part, each in [("network", max(0.0, seconds - known)), *named]:
        yield {"part": part, "ms": in_ms(each), "estimated": False}
