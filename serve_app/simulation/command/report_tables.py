"""The tables of the report of simulated runs, from the rows that the JSON output has as well."""

from collections.abc import Callable, Iterator, Mapping, Sequence

from serve_app.metrics.confidence import ConfidenceInterval, interval_95
from serve_app.reports.document import Cell, ReportTable, interval_cell, number_cell
from serve_app.simulation.command.results import FIGURES, Row

RowsByPolicy = Mapping[str, Sequence[Row]]
"""Runs as JSON, by the name of their policy."""

_PERCENTILES = ("p50", "p95", "p99", "max")
_MOST_TENANTS = 20


def tables(rows: RowsByPolicy) -> Iterator[ReportTable]:
    """The figures of every policy, its percentiles, how requests ended, and tenants."""
    count = len(next(iter(rows.values())))
    over = f"means over {count} seeds ± 95 % interval" if count > 1 else "of one seed, so without intervals"
    yield ReportTable(
        caption=f"Every policy: {over}",
        head=["policy", "seeds", *(figure.heading for figure in FIGURES)],
        rows=[
            [
                name,
                number_cell(len(group)),
                *(interval_cell(_over_seeds(group, figure.of), figure.decimals) for figure in FIGURES),
            ]
            for name, group in rows.items()
        ],
    )
    yield ReportTable(
        caption=f"Percentiles of the TTFT in seconds: {over}",
        head=["policy", "prompts", *_PERCENTILES],
        rows=[
            [name, size, *(interval_cell(_over_seeds(group, _ttft(size, each)), 3) for each in _PERCENTILES)]
            for name, group in rows.items()
            for size in ("short", "long")
        ],
        text_columns=2,
    )
    yield _outcomes(rows)
    yield from _queues(rows)
    tenants = _tenants(rows)
    if tenants is not None:
        yield tenants


def _over_seeds(rows: Sequence[Row], of: Callable[[Row], float | None]) -> ConfidenceInterval | None:
    values = [value for row in rows if (value := of(row)) is not None]
    return interval_95(values) if values else None


def _ttft(size: str, figure: str) -> Callable[[Row], float | None]:
    return lambda row: row["metrics"]["ttft_s"][size][figure]


def _outcomes(rows: RowsByPolicy) -> ReportTable:
    names = sorted(
        {name for group in rows.values() for row in group for name in row["whole_run"]["outcomes"]}
    )
    return ReportTable(
        caption="How the requests of all runs ended, those before the measurement included",
        head=["policy", *names, "preemptions"],
        rows=[
            [
                policy,
                *(
                    number_cell(sum(row["whole_run"]["outcomes"].get(name, 0) for row in group))
                    for name in names
                ),
                number_cell(sum(row["whole_run"]["preemptions"] or 0 for row in group)),
            ]
            for policy, group in rows.items()
        ],
    )


def _queues(rows: RowsByPolicy) -> Iterator[ReportTable]:
    """The length queues that policies had learned by the end of the first seed's run."""
    lines: list[list[str | Cell]] = []
    for policy, group in rows.items():
        for found in group[0]["partitions"][-1:]:
            bounds = ", ".join(f"{queue['min']:,}-{queue['max']:,}" for queue in found["queues"])
            lines.append([policy, bounds, number_cell(len(found["queues"])), number_cell(found["at_s"], 1)])
    if lines:
        yield ReportTable(
            caption="Length queues at the end of the first seed's run, in prompt tokens",
            head=["policy", "queues", "number", "in force since, s"],
            rows=lines,
            text_columns=2,
        )


def _tenants(rows: RowsByPolicy) -> ReportTable | None:
    """The mean TTFT of the tenants with most requests; None when there is one tenant only."""
    first = next(iter(rows.values()))[0]["metrics"]["tenants"]
    if len(first) < 2:
        return None
    names = sorted(first, key=lambda name: -first[name]["requests"])[:_MOST_TENANTS]
    return ReportTable(
        caption=f"Mean TTFT of tenants in seconds, means over seeds ± 95 % interval: {len(names)} of "
        f"{len(first):,}, those with most requests",
        head=["tenant", "requests, first seed", *rows],
        rows=[
            [
                name,
                number_cell(first[name]["requests"]),
                *(interval_cell(_over_seeds(group, _tenant_ttft(name)), 3) for group in rows.values()),
            ]
            for name in names
        ],
    )


def _tenant_ttft(name: str) -> Callable[[Row], float | None]:
    def of(row: Row) -> float | None:
        figures = row["metrics"]["tenants"].get(name)
        return None if figures is None else figures["ttft_s"]["mean"]

    return of
