"""Output of a comparison: a table, a verdict, and JSON."""

from collections import Counter
from collections.abc import Iterator

from serve_app.bench.comparison import FEW_SLICES, EndpointComparison, PairedDifference
from serve_app.bench.interleave import Interleaved
from serve_app.tables import shown_table

_SHOWN = {"ttft_s": "TTFT ms", "tpot_s": "TPOT ms", "e2e_s": "E2E ms"}
_CLEAR, _UNCLEAR = "*", ""


def comparison_table(found: EndpointComparison, urls: tuple[str, str]) -> str:
    """One line for each figure: at both endpoints, the difference with its interval, and the change."""
    lines = [
        _line(f"{_SHOWN[latency]} {name}", each, 1_000)
        for latency, figures in found.latencies.items()
        for name, each in figures.items()
    ]
    lines.append(_line("errors %", found.errors, 100))
    head = ("", "A", "B", "B - A", "95 % interval", "change", "")
    notes = [f"A {urls[0]}", f"B {urls[1]}", _basis(found)]
    return "\n".join((*notes, "", shown_table(head, lines, text_columns=1)))


def _basis(found: EndpointComparison) -> str:
    return (
        f"{found.pairs:,} requests to each in {found.slices:,} slices in turns, latencies of the "
        f"{found.completed_by_both:,} that both completed; {_CLEAR}: the interval leaves out zero"
    )


def _line(name: str, each: PairedDifference, scale: float) -> tuple[str, ...]:
    decimals = 2
    interval = "-"
    if each.low is not None and each.high is not None:
        interval = f"{scale * each.low:+,.{decimals}f} to {scale * each.high:+,.{decimals}f}"
    change = "-" if not each.base else f"{each.difference / each.base:+.1%}"
    return (
        name,
        f"{scale * each.base:,.{decimals}f}",
        f"{scale * each.other:,.{decimals}f}",
        f"{scale * each.difference:+,.{decimals}f}",
        interval,
        change,
        _CLEAR if each.is_clear else _UNCLEAR,
    )


def outcomes(played: Interleaved) -> tuple[Counter[str], Counter[str]]:
    """How the requests ended at each endpoint."""
    return (
        Counter(pair.base.outcome.value for pair in played.pairs),
        Counter(pair.other.outcome.value for pair in played.pairs),
    )


def comparison_warnings(found: EndpointComparison) -> Iterator[str]:
    """What makes the intervals worth little."""
    if found.slices < FEW_SLICES:
        yield (
            f"{found.slices} slices are few for an interval: raise --duration or --requests, or lower "
            "--slice-s"
        )
    if not found.completed_by_both:
        yield "no request was completed by both endpoints: there are no latencies to compare"
