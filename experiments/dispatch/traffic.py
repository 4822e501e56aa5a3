"""Fleets under steady traffic: conversations at the rate that takes a share of all places."""

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from serve_app.request import Request
from serve_app.routing.replica import ReplicaSpec
from serve_app.simulation.workload import Disclosure, requests_of
from serve_app.workloads.conversations import ConversationSettings, conversations
from serve_app.workloads.trace import Trace

POOLS = ("short", "long")
_CONTEXT_TOKENS = {"short": 8_192, "long": 16_384}
# More than running requests need on average, so that places run out before tokens do.
_KV_TOKENS_PER_PLACE = 8_000
_KV_BLOCK_TOKENS = 16
# A prefill, and a step of the decode: of a 70B model on four H100, as its profile states them.
_PREFILL_S = 0.05
_PREFILL_S_PER_TOKEN = 0.000_107
STEP_S = 0.035
# Sessions go on soon, and are cut out when about as many end as begin.
_PAUSE_S = 4.0
_SETTLED_S = 40.0
_NOMINAL_S = 8.0


@dataclass(frozen=True, slots=True)
class Job:
    """A request, and how long it takes once it is dispatched."""

    request: Request
    prefill_s: float
    decode_s: float
    output_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetTraffic:
    """A fleet and what is asked of it.

    Attributes:
        places: sequences that each replica runs at once.
        b_short_tokens: border under which half of the place-seconds are at home.
    """

    replicas: int
    places: int
    b_short_tokens: int
    jobs: Sequence[Job]
    report_interval_s: float

    def specs(self) -> list[ReplicaSpec]:
        """Half of the replicas short, half long, by turns."""
        return [
            ReplicaSpec(
                replica_id=f"r{number}",
                pool=POOLS[number % 2],
                max_model_len=_CONTEXT_TOKENS[POOLS[number % 2]],
                kv_tokens=self.places * _KV_TOKENS_PER_PLACE,
                max_num_seqs=self.places,
            )
            for number in range(self.replicas)
        ]

    @property
    def home(self) -> Callable[[Request], str]:
        """The pool of a request whose lengths are known."""
        return lambda request: POOLS[budget_tokens(request) > self.b_short_tokens]


def traffic(
    replicas: int, places: int, taken: float, requests: int, *, report_interval_s: float, seed: int
) -> FleetTraffic:
    """Conversations, cut out of the midst of them, at the rate that takes such a share of all places.

    By Little's law the places taken are the work that comes per second, in place-seconds.
    """
    settings = ConversationSettings(pause_s=_PAUSE_S)
    nominal_per_s = taken * places * replicas / _NOMINAL_S
    before = round(_SETTLED_S * nominal_per_s)
    drawn = conversations(before + requests, nominal_per_s, seed, settings).requests[before:]
    work_s = sum(_prefill_s(one.prompt_tokens) + STEP_S * one.output_tokens for one in drawn)
    span_s = work_s / (taken * places * replicas)
    first_s, scale = drawn[0].arrival_s, span_s / (drawn[-1].arrival_s - drawn[0].arrival_s)
    moved = tuple(replace(one, arrival_s=scale * (one.arrival_s - first_s)) for one in drawn)
    jobs = _jobs(Trace(name="conversations", source="generated", requests=moved))
    return FleetTraffic(
        replicas=replicas,
        places=places,
        b_short_tokens=_border(jobs),
        jobs=jobs,
        report_interval_s=report_interval_s,
    )


def _jobs(trace: Trace) -> list[Job]:
    return [
        Job(
            one.request,
            _prefill_s(one.request.shape.prompt_tokens or 0),
            STEP_S * one.output_tokens,
            one.output_tokens,
        )
        for one in requests_of(trace, Disclosure(output_known=True), _KV_BLOCK_TOKENS)
    ]


def _prefill_s(prompt_tokens: int) -> float:
    return _PREFILL_S + _PREFILL_S_PER_TOKEN * prompt_tokens


def budget_tokens(request: Request) -> int:
    """Prompt and answer together."""
    return (request.shape.prompt_tokens or 0) + (request.spec.max_output_tokens or 0)


def _border(jobs: Sequence[Job]) -> int:
    ordered = sorted(jobs, key=lambda job: budget_tokens(job.request))
    half = sum(job.prefill_s + job.decode_s for job in jobs) / 2
    sums = itertools.accumulate(job.prefill_s + job.decode_s for job in ordered)
    return next(budget_tokens(job.request) for job, below in zip(ordered, sums, strict=True) if below >= half)
