"""The plots of the report of simulated runs: times to first token, by length, and over time."""

from collections.abc import Callable, Iterator, Mapping, Sequence

from serve_app.metrics.record import RequestRecord
from serve_app.reports.curves import Curves, by_length, distributions, mean, p95, ttfts, without_first_token
from serve_app.reports.document import Look, Plot, PlotAxis, Series, Unit
from serve_app.simulation.run import RunResult

ByPolicy = Mapping[str, Sequence[RunResult]]
"""Runs with their records, by the name of their policy."""


def distribution_plots(by_policy: ByPolicy, base: str) -> Iterator[Plot]:
    """The distribution of the TTFT, of short prompts and of long ones."""
    for title, records in _by_size(by_policy, lambda run: run.measured):
        curves = distributions({name: ttfts(members) for name, members in records.items()})
        count = max(map(len, records.values()))
        yield Plot(
            title=f"Distribution: {title}",
            reading=f"The share of requests that had their first token by then; the line that rises first is "
            f"best. {count:,} requests each.",
            x=PlotAxis(label="TTFT", unit=Unit.SECONDS, logarithmic=True),
            y=PlotAxis(label="share of requests", unit=Unit.SHARE, logarithmic=None),
            places=curves.places,
            series=_series(curves, base),
        )


def length_plots(by_policy: ByPolicy, base: str) -> Iterator[Plot]:
    """The TTFT by the length of the prompt."""
    records = {name: [each for run in runs for each in run.measured] for name, runs in by_policy.items()}
    for title, figure in (("Mean TTFT", mean), ("P95 TTFT", p95)):
        curves = by_length(records, lambda record: record.ttft_s, figure)
        yield Plot(
            title=f"{title} by length of the prompt",
            reading="Lower is better. Where a policy lets some lengths wait for others, its line crosses the "
            "baseline's.",
            x=PlotAxis(label="prompt tokens", unit=Unit.COUNT, logarithmic=True, base=2),
            y=PlotAxis(label=title, unit=Unit.SECONDS, logarithmic=True),
            places=curves.places,
            series=_series(curves, base),
        )


def timeline_plots(by_policy: ByPolicy, base: str) -> Iterator[Plot]:
    """Who waits for a first token, over the run of the first seed."""
    firsts = {name: runs[:1] for name, runs in by_policy.items()}
    last_arrival = max((each.arrived_at for runs in firsts.values() for each in runs[0].records), default=0.0)
    for title, records in _by_size(firsts, lambda run: run.records):
        curves = without_first_token(records)
        yield Plot(
            title=f"Waiting for a first token: {title}",
            reading="Lower is better. A line that does not come down means more work than the fleet can do.",
            x=PlotAxis(label="time", unit=Unit.SECONDS, logarithmic=None),
            y=PlotAxis(label="requests", unit=Unit.NUMBER, logarithmic=False),
            places=curves.places,
            series=_series(curves, base),
            marks=[(last_arrival, "last arrival")],
        )


def _series(curves: Curves, base: str, look: Look = Look.LINE) -> list[Series]:
    return [
        Series(name=name, values=values, look=Look.BASELINE if name == base else look, colour=number)
        for number, (name, values) in enumerate(curves.lines.items())
    ]


def _by_size(
    by_policy: ByPolicy, records_of: Callable[[RunResult], Sequence[RequestRecord]]
) -> Iterator[tuple[str, dict[str, list[RequestRecord]]]]:
    """The records of short and of long prompts, by policy."""
    short_at = next(iter(by_policy.values()))[0].settings.short_at_tokens
    sizes: tuple[tuple[str, Callable[[int], bool]], ...] = (
        (f"short prompts, at most {short_at:,} tokens", lambda tokens: tokens <= short_at),
        ("long prompts, all others", lambda tokens: tokens > short_at),
    )
    for title, belongs in sizes:
        yield (
            title,
            {
                name: [each for run in runs for each in records_of(run) if belongs(each.prompt_tokens)]
                for name, runs in by_policy.items()
            },
        )
