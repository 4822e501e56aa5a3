"""Difference of two endpoints that served the same requests in alternation, with its uncertainty.

The trace is cut into slices of equal time. Each slice is sent to one endpoint and, after its last response,
to the other, so that neither works while the other is measured, and a drift of the machine or the network
affects both. Which endpoint is first alternates (A B, B A, A B ...), which cancels a steady drift. Prompts of
the two endpoints have different beginnings, unless the trace has a shared prefix. So if both use the same
engines, the second gets no prefix cache hits from the first.

Latencies are of the requests that both have completed. Requests of one slice share its queue and its time, so
slices are the independent observations, not requests. The standard error of a difference comes from
resampling whole slices (the bootstrap of clusters: Cameron, Gelbach, Miller, "Bootstrap-based improvements
for inference with clustered errors", 2008). The 95 % interval is the difference plus and minus that error,
times the point of Student's t for that many slices. Both sides of a pair are always drawn together, so
effects of a slice on both cancel.
"""

import argparse
import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace

import numpy as np
from numpy.typing import NDArray

from serve_app.core.metrics.confidence import t_95
from serve_app.core.metrics.record import RequestRecord
from serve_app.lab.bench.connection import ConnectionPool, Target
from serve_app.lab.bench.load import BodyFactory, BodySettings, ClientStats, LoadSettings, OpenLoop
from serve_app.lab.reports.document import (
    DifferenceTable,
    FigureDifference,
    Origin,
    Plot,
    PlotAxis,
    ReportSection,
    ReportTable,
    ResultReport,
    Sample,
    Unit,
    number_cell,
    verdict_of,
)
from serve_app.lab.reports.plots import Curves, distribution_plot, length_plots, ttfts
from serve_app.lab.workloads.trace import Trace


@dataclass(frozen=True, slots=True)
class ComparedEndpoint:
    """One of the two endpoints, with the bodies of its requests."""

    target: Target
    bodies: BodySettings


@dataclass(frozen=True, slots=True)
class RecordPair:
    """The records of one trace request at both endpoints, and its slice."""

    slice_number: int
    base: RequestRecord
    other: RequestRecord


@dataclass(frozen=True, slots=True)
class Interleaved:
    """The pairs of a run in trace order, and the client's figures for both endpoints together."""

    pairs: list[RecordPair]
    client: ClientStats


def slices_of(trace: Trace, slice_s: float) -> Iterator[Trace]:
    """Yield parts of the trace of equal duration, without empty ones."""
    members: dict[int, list[int]] = {}
    for number, request in enumerate(trace.requests):
        members.setdefault(int(request.arrival_s // slice_s), []).append(number)
    for numbers in members.values():
        yield replace(trace, requests=tuple(trace.requests[number] for number in numbers))


async def interleave(
    trace: Trace,
    endpoints: tuple[ComparedEndpoint, ComparedEndpoint],
    settings: LoadSettings,
    slice_s: float,
    on_record: Callable[[RequestRecord], object] = lambda _: None,
) -> Interleaved:
    """Send every request of the trace to both endpoints, slice by slice.

    If cancelled, return the pairs of the slices that both have completed.

    Args:
        on_record: called with each record, for a progress bar.
    """
    pools = [ConnectionPool(endpoint.target) for endpoint in endpoints]
    factories = [
        BodyFactory(endpoint.bodies, endpoint.target.authority, endpoint.target.path_prefix)
        for endpoint in endpoints
    ]
    pairs: list[RecordPair] = []
    client = ClientStats()
    sent = 0
    try:
        for number, part in enumerate(slices_of(trace, slice_s)):
            records: dict[int, dict[str, RequestRecord]] = {}
            for side in (0, 1) if number % 2 == 0 else (1, 0):
                # Prompts derive from numbers: even ones for one endpoint, odd ones for the other.
                loop = OpenLoop(pools[side], factories[side], settings, on_record, 2 * sent + side, 2)
                played = await loop.run(part)
                _add(client, played.client)
                client.connections = sum(pool.opened for pool in pools)
                records[side] = {record.request_id: record for record in played.records}
                if client.interrupted:
                    return Interleaved(pairs, client)
            pairs += _paired(number, sent, len(part.requests), records)
            sent += len(part.requests)
    finally:
        for pool in pools:
            pool.close()
    return Interleaved(pairs, client)


def _paired(
    slice_number: int, first: int, count: int, records: dict[int, dict[str, RequestRecord]]
) -> Iterator[RecordPair]:
    for number in range(first, first + count):
        base, other = (records[side][f"bench-{2 * number + side}"] for side in (0, 1))
        yield RecordPair(slice_number, base, other)


def _add(client: ClientStats, of_slice: ClientStats) -> None:
    """Add the figures of one slice."""
    client.late += of_slice.late
    client.throttled += of_slice.throttled
    client.peak_in_flight = max(client.peak_in_flight, of_slice.peak_in_flight)
    client.wrong_length += of_slice.wrong_length
    client.without_usage += of_slice.without_usage
    client.interrupted |= of_slice.interrupted


FEW_SLICES = 6
"""With fewer slices, an interval is very wide and its error hardly known."""

_RESAMPLES = 400
_SEED = 1

Figures = NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class PairedDifference:
    """One figure at both endpoints.

    Attributes:
        base, other: value at each endpoint.
        difference: other minus base.
        low, high: the 95 % interval of the difference; None with only one slice.
        n: number of requests.
    """

    base: float
    other: float
    difference: float
    low: float | None
    high: float | None
    n: int

    @property
    def is_clear(self) -> bool:
        """True if the interval excludes zero."""
        return self.low is not None and self.high is not None and (self.low > 0 or self.high < 0)

    def as_json(self) -> dict[str, float | int | bool | None]:
        """Return all figures by name, and whether the interval excludes zero."""
        return asdict(self) | {"is_clear": self.is_clear}


@dataclass(frozen=True, slots=True, kw_only=True)
class EndpointComparison:
    """All differences.

    Attributes:
        latencies: in seconds, by latency and figure: `ttft_s`, `tpot_s`, `e2e_s`; `mean`, `p50`, `p99`.
        errors: share of the requests that did not complete.
        pairs, slices: number of requests sent to both, and of their slices.
        completed_by_both: number of pairs with latencies.
    """

    latencies: dict[str, dict[str, PairedDifference]]
    errors: PairedDifference
    pairs: int
    slices: int
    completed_by_both: int

    def as_json(self) -> dict[str, object]:
        """Return all values by name."""
        return {
            "pairs": self.pairs,
            "completed_by_both": self.completed_by_both,
            "slices": self.slices,
            "latencies": {
                latency: {name: each.as_json() for name, each in figures.items()}
                for latency, figures in self.latencies.items()
            },
            "errors": self.errors.as_json(),
        }


LATENCIES: dict[str, Callable[[RequestRecord], float | None]] = {
    "ttft_s": lambda record: record.ttft_s,
    "tpot_s": lambda record: record.tpot_s,
    "e2e_s": lambda record: record.e2e_s,
}


def compare(pairs: Sequence[RecordPair]) -> EndpointComparison:
    """Compare the two endpoints over these pairs.

    Raises:
        ValueError: there are no pairs.
    """
    if not pairs:
        raise ValueError("no request was sent to both endpoints, so there is nothing to compare")
    completed = [pair for pair in pairs if pair.base.completed and pair.other.completed]
    latencies = {}
    for name, latency in LATENCIES.items():
        slices = _slices(completed, latency)
        if slices:
            latencies[name] = _differences(slices, _latency_figures, ("mean", "p50", "p99"))
    lost = _slices(pairs, lambda record: float(not record.completed))
    return EndpointComparison(
        latencies=latencies,
        errors=_differences(lost, _mean, ("share",))["share"],
        pairs=len(pairs),
        slices=len({pair.slice_number for pair in pairs}),
        completed_by_both=len(completed),
    )


def _slices(pairs: Iterable[RecordPair], value_of: Callable[[RequestRecord], float | None]) -> list[Figures]:
    """Return an array per slice with the values of both endpoints as rows, without incomplete pairs."""
    slices: dict[int, list[tuple[float, float]]] = {}
    for pair in pairs:
        base, other = value_of(pair.base), value_of(pair.other)
        if base is not None and other is not None:
            slices.setdefault(pair.slice_number, []).append((base, other))
    return [np.array(values).T for values in slices.values()]


def _latency_figures(values: Figures) -> Figures:
    """Return mean, median and 99th percentile of each row."""
    figures: Figures = np.vstack((values.mean(axis=1), np.quantile(values, (0.5, 0.99), axis=1)))
    return figures


def _mean(values: Figures) -> Figures:
    figures: Figures = values.mean(axis=1)[np.newaxis]
    return figures


def _differences(
    slices: list[Figures], figures_of: Callable[[Figures], Figures], names: Sequence[str]
) -> dict[str, PairedDifference]:
    """Return the figures of both rows over all slices, with the interval of their difference."""
    whole = np.concatenate(slices, axis=1)
    figures = figures_of(whole)
    half = _half_widths(slices, figures_of)
    found = {}
    for place, name in enumerate(names):
        base, other = (float(figure) for figure in figures[place])
        difference = other - base
        found[name] = PairedDifference(
            base=base,
            other=other,
            difference=difference,
            low=None if half is None else difference - float(half[place]),
            high=None if half is None else difference + float(half[place]),
            n=whole.shape[1],
        )
    return found


def _half_widths(slices: list[Figures], figures_of: Callable[[Figures], Figures]) -> Figures | None:
    """Return half the width of the interval of each figure's difference."""

    def difference(drawn: Figures) -> Figures:
        base, other = figures_of(drawn).T
        found: Figures = other - base
        return found

    return half_widths(slices, difference)


def half_widths(slices: Sequence[Figures], figures_of: Callable[[Figures], Figures]) -> Figures | None:
    """Return half the width of the 95 % interval of each figure, from resampled slices; None for one slice.

    Args:
        slices: values of each slice, with a column per request.
        figures_of: computes figures from some of these columns, as one row.
    """
    count = len(slices)
    if count == 1:
        return None
    rng = np.random.default_rng(_SEED)
    resampled = np.empty((_RESAMPLES, figures_of(slices[0]).shape[0]))
    for row in resampled:
        row[:] = figures_of(
            np.concatenate([slices[index] for index in rng.integers(0, count, count)], axis=1)
        )
    # The factor corrects the resampled spread of `count` slices to that of the population.
    half: Figures = t_95(count - 1) * math.sqrt(count / (count - 1)) * resampled.std(axis=0, ddof=1)
    return half


def comparison_table(found: EndpointComparison, urls: tuple[str, str]) -> str:
    """Return a table with both values of each figure, the difference with its interval, and the change."""
    basis = (
        f"{found.pairs:,} requests to each in {found.slices:,} alternating slices; latencies of the "
        f"{found.completed_by_both:,} that both completed"
    )
    differences = DifferenceTable(caption="", base=_A, other=_B, differences=list(_shown_differences(found)))
    return "\n".join((f"A {urls[0]}", f"B {urls[1]}", basis, "", differences.as_text()))


def outcomes(played: Interleaved) -> tuple[Counter[str], Counter[str]]:
    """Count the outcomes at each endpoint."""
    return (
        Counter(pair.base.outcome.value for pair in played.pairs),
        Counter(pair.other.outcome.value for pair in played.pairs),
    )


def comparison_warnings(found: EndpointComparison) -> Iterator[str]:
    """Yield reasons for which the intervals are unreliable."""
    if found.slices < FEW_SLICES:
        yield (
            f"{found.slices} slices are too few for a reliable interval: raise --duration or --requests, or "
            "lower --slice-s"
        )
    if not found.completed_by_both:
        yield "no request was completed by both endpoints, so there are no latencies to compare"


_A, _B = "A", "B"
LATENCY_NAMES = {"ttft_s": "TTFT", "tpot_s": "TPOT", "e2e_s": "end to end"}
_FIGURES = {"mean": "mean", "p50": "median", "p99": "P99"}
_ERRORS = "error rate"
# Figures in the verdict.
_DECISIVE = {"mean TTFT", "P99 TTFT", "mean TPOT", "mean end to end", _ERRORS}


@dataclass(frozen=True, slots=True, kw_only=True)
class ComparedRun:
    """A comparison: its figures, and the pairs that they are computed from."""

    args: argparse.Namespace
    trace: Trace
    found: EndpointComparison
    played: Interleaved


def comparison_report(run: ComparedRun, origin: Origin, warnings: Sequence[str]) -> ResultReport:
    """Return the report of a comparison."""
    args, trace, found = run.args, run.trace, run.found
    differences = list(_shown_differences(found))
    sample = Sample(found.slices, "slice", "slices", "raise --duration or lower --slice-s")
    decisive = [one for one in differences if one.figure in _DECISIVE]
    return ResultReport(
        title=f"{args.compare} against {args.url} on {trace.name}",
        question=f"Does B, {args.compare}, serve {trace.title} better than A, {args.url}?",
        facts=list(_facts(run)),
        verdict=[verdict_of(_A, _B, decisive, sample)],
        notes=[
            "Both served the same requests in alternating slices; each was idle during the other's slices.",
            "95 % confidence intervals are bootstrapped over whole slices.",
            "Latencies cover the requests that both completed.",
            "Intervals are not corrected for multiple comparisons.",
            *warnings,
        ],
        sections=list(_sections(run, differences)),
        origin=origin,
    )


def _facts(run: ComparedRun) -> Iterator[tuple[str, str]]:
    args, trace, found = run.args, run.trace, run.found
    yield "A, the baseline", args.url
    yield "B", args.compare
    yield "workload", f"{trace.title}: {len(trace.requests):,} requests {trace.pace}"
    yield "source", trace.source
    yield (
        "measured",
        (
            f"{found.pairs:,} requests to each in {found.slices:,} slices of {args.slice_s:g} s, "
            f"{found.completed_by_both:,} completed by both"
        ),
    )


def _shown_differences(found: EndpointComparison) -> Iterator[FigureDifference]:
    for latency, figures in found.latencies.items():
        for name, each in figures.items():
            yield _difference(f"{_FIGURES[name]} {LATENCY_NAMES[latency]}", each, 1_000, "ms")
    yield _difference(_ERRORS, found.errors, 100, "%")


def _difference(figure: str, each: PairedDifference, scale: float, unit: str) -> FigureDifference:
    return FigureDifference(
        figure=figure,
        base=each.base,
        other=each.other,
        difference=each.difference,
        low=each.low,
        high=each.high,
        scale=scale,
        unit=unit,
    )


def _sections(run: ComparedRun, differences: Sequence[FigureDifference]) -> Iterator[ReportSection]:
    found, played = run.found, run.played
    yield ReportSection(
        title="Differences from A",
        intro="Bar: 95 % interval of the change; dot: its mean; line: no change.",
        blocks=[
            DifferenceTable(
                caption=f"B against A, {found.slices:,} slices", base=_A, other=_B, differences=differences
            )
        ],
    )
    both = [pair for pair in played.pairs if pair.base.completed and pair.other.completed]
    records: dict[str, list[RequestRecord]] = {
        _A: [pair.base for pair in both],
        _B: [pair.other for pair in both],
    }
    yield ReportSection(
        title="Time to first token",
        intro="From the scheduled send time of a request to the first token of its response.",
        blocks=[
            distribution_plot("Distribution", records, _A),
            _by_slice(played),
            *length_plots(records, _A),
        ],
    )
    yield ReportSection(title="Figures", blocks=[_outcomes(played)])


def _by_slice(played: Interleaved) -> Plot:
    numbers = sorted({pair.slice_number for pair in played.pairs})
    lines: dict[str, list[float | None]] = {_A: [], _B: []}
    for number in numbers:
        pairs = [pair for pair in played.pairs if pair.slice_number == number]
        for name, records in ((_A, [pair.base for pair in pairs]), (_B, [pair.other for pair in pairs])):
            values = ttfts(records)
            lines[name].append(float(np.mean(values)) if values else None)
    curves = Curves([float(number) for number in numbers], lines)
    return Plot(
        title="Mean TTFT per slice",
        reading="Lower is better. Changes of the workload move "
        "both lines; the gap between them is the difference.",
        x=PlotAxis(label="slice of the trace", unit=Unit.COUNT, logarithmic=None),
        y=PlotAxis(label="mean TTFT", unit=Unit.SECONDS),
        positions=curves.positions,
        series=curves.series(_A),
    )


def _outcomes(played: Interleaved) -> ReportTable:
    ended = outcomes(played)
    names = sorted(set().union(*ended))
    return ReportTable(
        caption="Outcomes of the requests",
        head=["endpoint", *names],
        rows=[
            [label, *(number_cell(counts[name]) for name in names)]
            for label, counts in zip((_A, _B), ended, strict=True)
        ],
    )
