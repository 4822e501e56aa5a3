"""What is planned: cases on real traces, a grid of synthetic mixes, and the papers' own rows."""

from collections.abc import Iterator
from dataclasses import dataclass

from serve_app.metrics.slo import Slo
from serve_app.planning.sizing.candidates import FleetOptions
from serve_app.planning.sizing.verification import Workload
from serve_app.settings_base import settings
from serve_app.simulation.workload import TraceChoice


@settings
class PlanCase:
    """One plan; fields as the arguments of `python -m serve_app plan`.

    Attributes:
        name: of its row.
        title: of its line in the table.
        requests: in each run.
    """

    name: str
    title: str
    trace: str
    profile: str
    rate_per_s: float
    requests: int
    ttft_s: float = 2.0
    tpot_s: float = 0.08
    short_profiles: tuple[str, ...] = ()
    b_short_tokens: tuple[int, ...] = (1_024, 2_048, 4_096, 8_192)
    worst_case_slots: int | None = None
    variants: bool = True
    candidates: int = 2

    def options(self) -> FleetOptions:
        """What the planner may choose from."""
        return FleetOptions(
            profile=self.profile,
            short_profiles=self.short_profiles,
            b_short_tokens=self.b_short_tokens,
            worst_case_slots=self.worst_case_slots,
            variants=self.variants,
            candidates=self.candidates,
        )

    def demand(self, trace: str) -> Workload:
        """What the fleets are to serve.

        Args:
            trace: name or path of the trace; a mix of the grid is in a file.
        """
        return Workload(
            trace=TraceChoice(name=trace, requests=self.requests, arrivals="poisson"),
            rate_per_s=self.rate_per_s,
            slo=Slo(ttft_s=self.ttft_s, tpot_s=self.tpot_s),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Mix:
    """Short and long requests.

    Attributes:
        short, long: prompt and output tokens, means; lengths vary by a third around them.
        long_ratio: share of the requests that are long.
    """

    short: tuple[int, int]
    long: tuple[int, int]
    long_ratio: float

    @property
    def name(self) -> str:
        """In the table."""
        (short, answer), (long, long_answer) = self.short, self.long
        return f"{short:,} + {answer:,} and {long:,} + {long_answer:,}, {self.long_ratio:.0%} long"

    @property
    def b_short_tokens(self) -> int:
        """Half-way between the kinds."""
        return (sum(self.short) + sum(self.long)) // 2


@settings
class MixGrid:
    """Every combination of these, planned like a case."""

    profile: str
    rate_per_s: float
    requests: int
    long_ratios: tuple[float, ...]
    short: tuple[tuple[int, int], ...]
    long: tuple[tuple[int, int], ...]
    ttft_s: float = 2.0
    tpot_s: float = 0.08
    worst_case_slots: int | None = None

    def mixes(self) -> Iterator[Mix]:
        """All of them."""
        for ratio in self.long_ratios:
            for short in self.short:
                for long in self.long:
                    yield Mix(short=short, long=long, long_ratio=ratio)

    def case(self, mix: Mix) -> PlanCase:
        """The plan of one of them."""
        return PlanCase(
            name=mix.name,
            title=mix.name,
            trace=mix.name,
            profile=self.profile,
            rate_per_s=self.rate_per_s,
            requests=self.requests,
            ttft_s=self.ttft_s,
            tpot_s=self.tpot_s,
            b_short_tokens=(mix.b_short_tokens,),
            worst_case_slots=self.worst_case_slots,
            variants=False,
            candidates=1,
        )


@settings
class PublishedRow:
    """A row of the papers' tables.

    Attributes:
        printed: what the papers print.
        closed_form: saving by their closed form, as printed; None where none is.
        context_tokens: longest context of the undivided fleet.
    """

    trace: str
    printed: str
    rate_per_s: float
    ttft_s: float
    b_short_tokens: int
    context_tokens: int
    closed_form: float | None = None


@settings
class PlanningExperiment:
    """What is planned.

    Attributes:
        stand_in_replicas: an undivided fleet of more is simulated at a share of its size and rate.
        published_requests: of each trace, whose lengths the papers' model is given.
    """

    cases: tuple[PlanCase, ...]
    grid: MixGrid
    published: tuple[PublishedRow, ...]
    seeds: int
    stand_in_replicas: int
    published_requests: int = 20_000
