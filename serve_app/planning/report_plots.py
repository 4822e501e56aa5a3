"""The plots of the report of a plan: size and cost against the border, and tails against size."""

from collections.abc import Callable, Iterator, Sequence

from serve_app.metrics.confidence import ConfidenceInterval
from serve_app.planning.plan import Plan
from serve_app.planning.sizing.candidates import PlanResult, SizedFleet
from serve_app.planning.sizing.fleets import PAGED, POOLS, WORST_CASE
from serve_app.planning.sizing.verification import Verification, at_full_size
from serve_app.reports.document import Look, Plot, PlotAxis, Series, Unit

_COLOURS = {WORST_CASE: 1, PAGED: 0, POOLS: 2}


def chosen_fleets(result: PlanResult) -> list[SizedFleet]:
    """The smallest fleet of each kind, as far as one meets the limits."""
    return [one for one in (result.worst_case, result.paged, result.pools) if one is not None]


def border_plots(result: PlanResult) -> Iterator[Plot]:
    """GPUs and cost against the border between the pools."""
    places = sorted({one.plan.b_short_tokens for one in result.modelled} | _simulated_borders(result))
    for title, unit, of_model, of_fleet in (
        ("GPUs", Unit.COUNT, lambda one: float(one.plan.gpus(one.counts)), lambda one: float(one.gpus)),
        ("US dollars an hour", Unit.DOLLARS, lambda one: one.usd_per_hour, lambda one: one.usd_per_hour),
    ):
        modelled = {one.plan.b_short_tokens: of_model(one) for one in result.modelled}
        baselines = [one for one in (result.paged, result.worst_case) if one is not None]
        series = [
            Series(
                name="pools, by the model",
                values=[modelled.get(place) for place in places],
                look=Look.DASHED,
                colour=3,
            ),
            Series(
                name="pools, simulated",
                values=_at_borders(result, places, of_fleet),
                look=Look.POINTS,
                colour=_COLOURS[POOLS],
            ),
            *(_level(one, len(places), of_fleet(one)) for one in baselines),
        ]
        yield Plot(
            title=title,
            reading="Lower is better. The level lines are fleets of one pool, as they were simulated.",
            x=PlotAxis(label="B_short, tokens", unit=Unit.COUNT, logarithmic=True, base=2),
            y=PlotAxis(label=title, unit=unit, logarithmic=None),
            places=[float(place) for place in places],
            series=series,
        )


def _simulated_borders(result: PlanResult) -> set[int]:
    return {one.plan.b_short_tokens for one in result.simulated if one.plan.name == POOLS}


def _at_borders(
    result: PlanResult, places: Sequence[int], of: Callable[[SizedFleet], float]
) -> list[float | None]:
    """The smallest simulated pair of pools at each border; None where there is none."""
    return [
        min(
            (
                of(one)
                for one in result.simulated
                if one.plan.name == POOLS and one.plan.b_short_tokens == place
            ),
            default=None,
        )
        for place in places
    ]


def _level(one: SizedFleet, count: int, value: float) -> Series:
    look = Look.BASELINE if one.plan.name == PAGED else Look.LINE
    return Series(name=one.plan.name, values=[value] * count, look=look, colour=_COLOURS[one.plan.name])


def tail_plots(plan: Plan) -> Iterator[Plot]:
    """The tail latencies of every size that was simulated."""
    slo = plan.demand.slo
    tails: tuple[tuple[str, Callable[[Verification], ConfidenceInterval | None], float | None], ...] = (
        ("P99 TTFT", lambda one: one.ttft, slo.ttft_s),
        ("P99 TPOT", lambda one: one.tpot, slo.tpot_s),
    )
    chosen = {one.plan.name: one.plan for one in chosen_fleets(plan.result)}
    measured = [one for one in plan.verifier.measured if one.plan == chosen.get(one.plan.name)]
    places = sorted({_gpus(plan, one) for one in measured})
    for title, of, limit in tails:
        series = [
            Series(
                name=f"{name}, {'meets' if meets else 'misses'} the limits",
                values=_tails_at(plan, places, of, [one for one in measured if _is(one, name, meets)]),
                look=Look.POINTS,
                colour=_COLOURS[name] + (0 if meets else 4),
            )
            for name in chosen
            for meets in (True, False)
            if any(_is(one, name, meets) for one in measured)
        ]
        if limit is not None:
            series.append(Series(name="limit", values=[limit] * len(places), look=Look.BASELINE))
        yield Plot(
            title=f"{title} against the number of GPUs",
            reading="A fleet must be below the limit. Of fleets with as many GPUs the highest is shown.",
            x=PlotAxis(label="GPUs", unit=Unit.COUNT, logarithmic=None),
            y=PlotAxis(label=title, unit=Unit.SECONDS, logarithmic=title == "P99 TTFT"),
            places=[float(place) for place in places],
            series=series,
        )


def _is(one: Verification, name: str, meets: bool) -> bool:
    return one.plan.name == name and one.meets is meets


def _gpus(plan: Plan, one: Verification) -> int:
    share = plan.verifier.share
    return one.plan.gpus({pool: at_full_size(count, share) for pool, count in one.counts.items()})


def _tails_at(
    plan: Plan,
    places: Sequence[int],
    of: Callable[[Verification], ConfidenceInterval | None],
    measured: Sequence[Verification],
) -> list[float | None]:
    highest: dict[int, float] = {}
    for one in measured:
        interval = of(one)
        if interval is not None:
            place = _gpus(plan, one)
            highest[place] = max(interval.mean, highest.get(place, interval.mean))
    return [highest.get(place) for place in places]
