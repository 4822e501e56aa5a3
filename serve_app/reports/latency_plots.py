"""The plots of request records that every report of a run has, with any number of runs in each."""

from serve_app.reports.curves import (
    Records,
    by_length,
    distributions,
    mean,
    over_time,
    p95,
    ttfts,
    without_first_token,
)
from serve_app.reports.document import Plot, PlotAxis, Unit

# So many requests in a bin of time that their mean says something, and bins enough for a line.
_IN_A_BIN, _FEWEST_BINS, _MOST_BINS = 20, 6, 80
_TIME = PlotAxis(label="time", unit=Unit.SECONDS, logarithmic=None)


def distribution_plot(title: str, records: Records, base: str | None) -> Plot:
    """The distribution of the TTFT of those that completed."""
    values = {name: ttfts(members) for name, members in records.items()}
    curves = distributions(values)
    counts = sorted({len(each) for each in values.values()})
    count = " to ".join(f"{each:,}" for each in (counts[0], counts[-1]) if each) if counts else "0"
    if len(counts) == 1:
        count = f"{counts[0]:,}"
    return Plot(
        title=title,
        reading="The share of requests that had their first token by then; the line that rises first is "
        f"best. A line stands for {count} requests.",
        x=PlotAxis(label="TTFT", unit=Unit.SECONDS, logarithmic=True),
        y=PlotAxis(label="share of requests", unit=Unit.SHARE, logarithmic=None),
        places=curves.places,
        series=curves.series(base),
    )


def length_plots(records: Records, base: str | None) -> list[Plot]:
    """The mean and the tail of the TTFT by the length of the prompt."""
    plots = []
    for title, figure in (("Mean TTFT", mean), ("P95 TTFT", p95)):
        curves = by_length(records, lambda record: record.ttft_s, figure)
        plots.append(
            Plot(
                title=f"{title} by length of the prompt",
                reading="Lower is better. Half an octave of lengths to a point; a gap where too few requests "
                "have such a length.",
                x=PlotAxis(label="prompt tokens", unit=Unit.COUNT, logarithmic=True, base=2),
                y=PlotAxis(label=title, unit=Unit.SECONDS, logarithmic=True),
                places=curves.places,
                series=curves.series(base),
            )
        )
    return plots


def waiting_plot(title: str, records: Records, base: str | None) -> Plot:
    """The number of requests without a first token over time; all records are on one clock from 0."""
    curves = without_first_token(records)
    last_s = max((each.arrived_at for members in records.values() for each in members), default=0.0)
    return Plot(
        title=title,
        reading="Lower is better. A line that keeps rising means more work than is done.",
        x=_TIME,
        y=PlotAxis(label="requests", unit=Unit.NUMBER),
        places=curves.places,
        series=curves.series(base),
        marks=[(last_s, "last arrival")],
    )


def ttft_over_time_plot(records: Records, base: str | None) -> Plot:
    """The mean TTFT by the time of arrival; all records are on one clock from 0."""
    most = max(map(len, records.values()), default=0)
    curves = over_time(records, mean, max(_FEWEST_BINS, min(_MOST_BINS, most // _IN_A_BIN)))
    return Plot(
        title="Mean TTFT by time of arrival",
        reading="Lower is better. A line that keeps rising means that the load was more than was served.",
        x=_TIME,
        y=PlotAxis(label="mean TTFT", unit=Unit.SECONDS),
        places=curves.places,
        series=curves.series(base),
    )
