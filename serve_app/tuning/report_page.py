"""HTML report of a study: whether a candidate is better than the incumbent, and the course of the search."""

import statistics
from collections.abc import Iterator

from serve_app.lab.reports.document import (
    DifferenceTable,
    FigureDifference,
    LineStyle,
    Listing,
    Origin,
    Plot,
    PlotAxis,
    ReportSection,
    ResultReport,
    Series,
    Unit,
)
from serve_app.tuning.digital_twin import TwinPlan
from serve_app.tuning.study import INCUMBENT
from serve_app.tuning.study_report import BEST, IN_FORCE, StudyReport


def study_page(report: StudyReport, plan: TwinPlan, origin: Origin) -> ResultReport:
    """Return the report of a completed study."""
    trace = plan.traffic
    outcome = "Its values are recommended." if report.finding.confident else "The current settings remain."
    return ResultReport(
        title=f"Settings for {trace.name}",
        question=f"Does any setting of the scheduler serve {trace.title} better than the current ones?",
        facts=list(_facts(report, plan)),
        verdict=[f"{report.verdict[:1].upper()}{report.verdict[1:]}.", outcome],
        notes=[
            "Both sides served the same windows of the same traffic, in a model of the engines.",
            "The search windows favour the best of many candidates, so the verdict uses fresh windows.",
            f"At most {report.settings.finalists} candidates reach them; one in forty wins by chance.",
        ],
        sections=list(_sections(report)),
        origin=origin,
    )


def _facts(report: StudyReport, plan: TwinPlan) -> Iterator[tuple[str, str]]:
    trace, settings = plan.traffic, report.settings
    rate = "" if trace.rate_per_s is None else f" at {trace.rate_per_s:.2f} requests/s"
    yield "workload", f"{trace.title}: {len(trace.requests):,} requests{rate}"
    yield "source", trace.source
    yield "fleet", f"{len(plan.engines)} engine{'' if len(plan.engines) == 1 else 's'} in the model"
    yield "parameters", ", ".join(each.model_path for each in report.space)
    yield "objective", f"{plan.objective.kind}, windows of {plan.settings.window_requests:,} requests"
    yield "search", f"{report.finding.trials} candidates on up to {settings.rungs[-1]} windows"
    yield "confirmation", f"the best candidates on {settings.confirm_windows} fresh windows"
    yield "effort", f"{report.course.requests:,} requests simulated in {report.course.seconds:.0f} s"


def _sections(report: StudyReport) -> Iterator[ReportSection]:
    rewards = list(_rewards(report))
    if rewards:
        yield ReportSection(
            title="Reward",
            intro="Higher is better. Bar: 95 % interval of the paired difference; line: no difference.",
            blocks=[
                DifferenceTable(
                    caption="Best candidate against the current values",
                    base=IN_FORCE,
                    other=BEST,
                    differences=rewards,
                )
            ],
        )
    if report.changes_table is not None:
        yaml_settings = report.yaml_settings
        listings = [] if yaml_settings is None else [Listing("For the model's settings:", yaml_settings)]
        yield ReportSection(title="Settings", blocks=[report.changes_table, *listings])
    yield ReportSection(
        title="Search",
        intro="Gain: mean difference in reward from the current values, on the same windows.",
        blocks=[*_course(report), *_fresh_windows(report)],
    )
    yield ReportSection(title="Figures", blocks=[report.classes_table])


# Rewards


def _rewards(report: StudyReport) -> Iterator[FigureDifference]:
    """Yield the paired differences on fresh windows, if any were played, and on those of the search."""
    finding, settings = report.finding, report.settings
    stages = (
        ("fresh windows", finding.confirmation, settings.fresh_windows),
        ("search windows (biased)", finding.search, settings.search_windows),
    )
    for name, comparison, windows in stages:
        if finding.best is not None and comparison is not None:
            base, other = (
                statistics.fmean(_measured(report, each, windows).values())
                for each in (INCUMBENT, finding.best.number)
            )
            yield FigureDifference(
                figure=f"reward on {name}",
                base=base,
                other=other,
                difference=comparison.mean,
                low=comparison.low,
                high=comparison.high,
                lower_is_better=False,
                decimals=4,
            )


def _measured(report: StudyReport, candidate: int, windows: range) -> dict[int, float]:
    """Return the measured rewards by window."""
    rewards = report.course.rewards(candidate, windows)
    return {window: reward for window, reward in rewards.items() if reward is not None}


# The search


def _course(report: StudyReport) -> Iterator[Plot]:
    rounds = report.course.rounds
    if len(rounds) > 1:
        yield Plot(
            title="Gain of the best candidate by effort",
            reading="Higher is better. Where the line is flat, further search found no improvement.",
            x=PlotAxis(label="requests simulated", unit=Unit.COUNT, logarithmic=None),
            y=PlotAxis(label="gain of the best candidate", logarithmic=None),
            positions=[float(each.requests) for each in rounds],
            series=[
                Series(name="current values", values=[0.0] * len(rounds), style=LineStyle.BASELINE),
                Series(
                    name="best candidate so far",
                    values=[each.gain for each in rounds],
                    style=LineStyle.STEP,
                    colour=2,
                ),
            ],
        )


def _fresh_windows(report: StudyReport) -> Iterator[Plot]:
    best, windows = report.finding.best, report.settings.fresh_windows
    if best is None:
        return
    yield Plot(
        title="Reward per fresh window",
        reading="Higher is better. Both serve the same requests in a window, so compare the two lines.",
        x=PlotAxis(label="window", unit=Unit.COUNT, logarithmic=None),
        y=PlotAxis(label="reward", logarithmic=None, from_zero=False),
        positions=[float(window) for window in windows],
        series=[
            Series(
                name=name,
                values=[report.course.rewards(candidate, windows).get(window) for window in windows],
                style=style,
                colour=2,
            )
            for name, candidate, style in (
                (IN_FORCE, INCUMBENT, LineStyle.BASELINE),
                (BEST, best.number, LineStyle.LINE),
            )
        ],
    )
