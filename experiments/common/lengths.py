"""Requests whose lengths are drawn evenly from ranges, of several tenants, with Poisson arrivals."""

import random
from collections.abc import Mapping

from serve_app.settings_base import settings
from serve_app.workloads.trace import Trace, TraceRequest


@settings
class Lengths:
    """What one tenant sends.

    Attributes:
        prompt: tokens, from and to.
        output: the same.
        share: of the requests, in parts of all shares.
    """

    prompt: tuple[int, int]
    output: tuple[int, int]
    share: float = 1.0


def drawn_trace(tenants: Mapping[str, Lengths], requests_per_s: float, requests: int, seed: int) -> Trace:
    """That many requests at that mean rate."""
    rng = random.Random(seed)  # noqa: S311 - traffic, not secrets
    names = list(tenants)
    shares = [tenant.share for tenant in tenants.values()]
    at, lines = 0.0, []
    for _ in range(requests):
        at += rng.expovariate(requests_per_s)
        name = rng.choices(names, shares)[0]
        tenant = tenants[name]
        line = TraceRequest(
            arrival_s=at,
            prompt_tokens=rng.randint(*tenant.prompt),
            output_tokens=rng.randint(*tenant.output),
            tenant=name,
        )
        lines.append(line)
    return Trace(name="drawn lengths", source="drawn lengths", requests=tuple(lines))
