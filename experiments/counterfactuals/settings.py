"""What is played, and its requests."""

from collections.abc import Mapping
from typing import Annotated

from serve_app.request import PriorityClass
from serve_app.settings_base import INNER_SHARE, POSITIVE, at_least, settings
from serve_app.workloads.streams import plain_stream
from serve_app.workloads.trace import Trace, TraceRequest


@settings
class CounterfactualsExperiment:
    """A mixed overload, and the questions about it.

    Attributes:
        rate_per_s: of arrivals, which do not wait for answers.
        short_tokens, long_tokens, output_tokens: bounds between which lengths are drawn evenly.
        shares: of the classes.
        repeats: live runs without a change.
        questions: a kind of change each, with a value for a policy.
    """

    requests: Annotated[int, at_least(20)]
    rate_per_s: Annotated[float, POSITIVE]
    seed: int
    replicas: Annotated[int, at_least(1)]
    profile: str
    max_num_seqs: Annotated[int, at_least(1)]
    policy: str
    short_tokens: tuple[int, int]
    long_tokens: tuple[int, int]
    long_share: Annotated[float, INNER_SHARE]
    output_tokens: tuple[int, int]
    shares: Mapping[str, float]
    tenants: Annotated[int, at_least(1)]
    repeats: Annotated[int, at_least(1)]
    questions: tuple[str, ...]
    least_wait_s: Annotated[float, POSITIVE]

    def trace(self) -> Trace:
        """The requests; the same for the same settings."""
        rng, now, requests = plain_stream(self.seed, "counterfactuals"), 0.0, list[TraceRequest]()
        for _ in range(self.requests):
            bounds = self.long_tokens if rng.random() < self.long_share else self.short_tokens
            requests.append(
                TraceRequest(
                    arrival_s=now,
                    prompt_tokens=rng.randint(*bounds),
                    output_tokens=rng.randint(*self.output_tokens),
                    tenant=f"tenant-{rng.randrange(self.tenants)}",
                    priority=PriorityClass(rng.choices(list(self.shares), list(self.shares.values()))[0]),
                )
            )
            now += rng.expovariate(self.rate_per_s)
        return Trace(name="mixed overload", source=f"seed {self.seed}", requests=tuple(requests))
