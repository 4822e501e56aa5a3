from dataclasses import replace

from serve_app.lab.reports.document import (
    Cell,
    DifferenceTable,
    FigureDifference,
    LineStyle,
    Origin,
    Plot,
    PlotAxis,
    ReportSection,
    ReportTable,
    ResultReport,
    Series,
    Unit,
)

DIFFERENCE = FigureDifference(
    figure="mean TTFT", base=2.0, other=1.0, difference=-1.0, low=-1.5, high=-0.5, unit="s"
)


def plot(name: str = "ours") -> Plot:
    return Plot(
        title="Distribution",
        reading="The line that rises first is best.",
        x=PlotAxis(label="TTFT", unit=Unit.SECONDS, logarithmic=True),
        y=PlotAxis(label="share of requests", unit=Unit.SHARE),
        positions=[0.01, 0.1, 1.0, 10.0],
        series=[
            Series(name="theirs", values=[0.0, 0.2, 0.6, 1.0], style=LineStyle.BASELINE),
            Series(name=name, values=[0.1, 0.5, None, 1.0], colour=1),
        ],
    )


def report(name: str = "ours", **changes: object) -> ResultReport:
    """Return a report with every kind of block and a policy named by a user."""
    whole = ResultReport(
        title=f"{name} against theirs",
        question=f"Is {name} better than theirs?",
        facts=[("policies", name), ("source", f"a file of {name}")],
        verdict=[f"{name} is better; see --help for more."],
        notes=[f"{name} was simulated"],
        sections=[
            ReportSection(
                title=f"Differences of {name}",
                intro=f"Of {name}",
                blocks=[
                    DifferenceTable(
                        caption=f"{name}: differences", base="theirs", other=name, differences=[DIFFERENCE]
                    ),
                    ReportTable(
                        caption=f"{name}: figures",
                        head=["policy", name],
                        rows=[[name, Cell("0.12", 0.1234)], ["theirs", Cell("-")]],
                    ),
                    plot(name),
                ],
            )
        ],
        origin=Origin(
            {"commit": "abc", "settings": {"policy": name}, "seeds": [0, 1], "trace": {name: None}},
            f"ewsjf simulate --policy {name}",
        ),
    )
    return replace(whole, **changes)  # type: ignore[arg-type]
