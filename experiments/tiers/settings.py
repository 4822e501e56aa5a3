"""What is played: kinds of requests by length, and fleets of one price."""

from collections.abc import Mapping
from typing import Annotated

import numpy as np

from serve_app.planning.sizing.costs import CostTable
from serve_app.settings_base import FINITE_POSITIVE, POSITIVE, SHARE, at_least, settings
from serve_app.simulation.fleet import FleetSettings
from serve_app.workloads.lengths import LognormalLengths
from serve_app.workloads.streams import stream
from serve_app.workloads.trace import Trace, TraceRequest


@settings
class Kind:
    """Requests of one kind.

    Attributes:
        share: of all requests.
        shortest, longest: prompts, in tokens; every order of magnitude in between is as frequent.
        answer_tokens: mean length of the answers, with a coefficient of variation of 0.5.
        ttft_s: time to first token within which a request counts for goodput.
    """

    share: Annotated[float, SHARE]
    shortest: Annotated[int, at_least(1)]
    longest: Annotated[int, at_least(1)]
    answer_tokens: Annotated[float, POSITIVE]
    ttft_s: Annotated[float, POSITIVE]


@settings
class TiersExperiment:
    """What is played.

    Attributes:
        kinds: by name; their shares add up to 1, and their prompts do not overlap.
        fleets: by the name that they have in the table; the first is what others are compared with.
        rates_per_s: of all requests together, a Poisson stream.
        warm_up_ratio: share of requests, the first by arrival, that is not measured.
        tpot_s: time per output token within which a request counts for goodput.
    """

    kinds: Mapping[str, Kind]
    fleets: Mapping[str, FleetSettings]
    rates_per_s: tuple[float, ...]
    requests: int
    seeds: int
    policy: str = "ewsjf"
    warm_up_ratio: float = 0.1
    tpot_s: Annotated[float, FINITE_POSITIVE] = 0.1

    def __post_init__(self) -> None:
        if abs(sum(kind.share for kind in self.kinds.values()) - 1) > 1e-9:
            raise ValueError(f"shares of kinds must add up to 1, got {self.kinds}")
        prices = {name: usd_per_hour(fleet) for name, fleet in self.fleets.items()}
        if max(prices.values()) - min(prices.values()) > 0.005:
            raise ValueError(f"fleets must have one price, got {prices}")

    def kind_of(self, prompt_tokens: int) -> str:
        """The kind of a request with a prompt of this length."""
        return next(name for name, kind in self.kinds.items() if prompt_tokens <= kind.longest)

    def trace(self, rate_per_s: float, seed: int) -> Trace:
        """The requests of a seed; at another rate the same ones come sooner or later."""
        rng = stream(seed, "tiers")
        arrivals = np.cumsum(rng.exponential(1.0, self.requests)) / rate_per_s
        names = list(self.kinds)
        drawn = rng.choice(len(names), self.requests, p=[self.kinds[name].share for name in names])
        requests = []
        for at, place in zip(arrivals, drawn, strict=True):
            kind = self.kinds[names[place]]
            prompt = np.exp(rng.uniform(np.log(kind.shortest), np.log(kind.longest)))
            answers = LognormalLengths(mean=kind.answer_tokens, cv=0.5, max_tokens=2_000)
            (answer,) = answers.sample(1, rng)
            requests.append(
                TraceRequest(arrival_s=float(at), prompt_tokens=int(prompt), output_tokens=int(answer))
            )
        return Trace(name="tiers", source=f"kinds of requests, seed {seed}", requests=tuple(requests))


def usd_per_hour(fleet: FleetSettings) -> float:
    """The price of a fleet at the planner's prices of GPUs."""
    costs = CostTable.load()
    return sum(count * costs.usd_per_hour(fleet.profile_of(pool)) for pool, count in fleet.replicas.items())
