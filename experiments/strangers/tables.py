"""Tables of this experiment."""

from collections.abc import Iterator, Sequence
from statistics import fmean

from experiments.common.rows import Row, where
from experiments.common.tables import Table, markdown
from experiments.strangers.run import ALTERNATE, CONFIGURED, LEAST, OURS

_TO_DIRECT = ("mean_s", "p99_s")
_TO_CONFIGURED = ("short_mean_s", "short_p99_s", "light_mean_s", "light_p99_s", "cold_mean_s", "cold_p99_s")


def _cells(rows: Sequence[Row]) -> Iterator[tuple[str, str, bool]]:
    """Yield case and load of each cell, and whether its servers have a limit."""
    for row in where(rows, variant=OURS):
        case = str(row.key["case"])
        yield case, str(row.key["load"]), "slot" in case or "at once" in case


def _figure(rows: Sequence[Row], case: str, load: str, variant: str, name: str) -> float:
    (row,) = where(rows, case=case, load=float(load), variant=variant)
    return fmean(row.figures[name])


def _ratio_to_direct(rows: Sequence[Row], case: str, load: str, name: str) -> float:
    """Return the ratio to the better of the two clients without a scheduler."""
    direct = min(_figure(rows, case, load, variant, name) for variant in (ALTERNATE, LEAST))
    return _figure(rows, case, load, OURS, name) / direct


def _work(rows: Sequence[Row], case: str, load: str) -> float:
    direct = max(_figure(rows, case, load, variant, "done_tokens") for variant in (ALTERNATE, LEAST))
    return _figure(rows, case, load, OURS, "done_tokens") / direct


def _configured_ratio(rows: Sequence[Row], case: str, load: str, name: str, *, is_limited: bool) -> float:
    """Return the ratio to a scheduler with the limit configured; to direct clients where there is none."""
    if not is_limited:
        return _ratio_to_direct(rows, case, load, name)
    return _figure(rows, case, load, OURS, name) / _figure(rows, case, load, CONFIGURED, name)


def _all_ratios(rows: Sequence[Row]) -> str:
    head = [
        *("servers", "load", "mean", "P99", "short: mean", "P99", "light: mean", "P99"),
        *("first 30 s: mean", "P99", "work", "at once"),
    ]
    lines = []
    for case, load, is_limited in _cells(rows):
        ratios = [
            *(_ratio_to_direct(rows, case, load, name) for name in _TO_DIRECT),
            *(_configured_ratio(rows, case, load, name, is_limited=is_limited) for name in _TO_CONFIGURED),
            _work(rows, case, load),
        ]
        most = _figure(rows, case, load, OURS, "most_at_once")
        lines.append([case, load, *(f"{each:.2f}" for each in ratios), f"{most:.0f}"])
    return markdown(head, lines, text_columns=2)


def _seconds(rows: Sequence[Row]) -> str:
    head = ["servers", "load", "alternate", "least in flight", "configured", "ours"]
    lines = []
    for case, load, _ in _cells(rows):
        pairs = [
            f"{_figure(rows, case, load, variant, 'mean_s'):.2f}, "
            f"{_figure(rows, case, load, variant, 'p99_s'):.2f}"
            for variant in (ALTERNATE, LEAST, CONFIGURED, OURS)
        ]
        lines.append([case, load, *pairs])
    return markdown(head, lines, text_columns=2)


def _headline(rows: Sequence[Row]) -> str:
    """Return the least and the largest ratios by kind of server and load."""
    head = ["servers", "load", "mean", "P99", "light tenants: mean", "work"]
    found: dict[tuple[str, str], list[tuple[float, float, float, float]]] = {}
    for case, load, is_limited in _cells(rows):
        light = _configured_ratio(rows, case, load, "light_mean_s", is_limited=is_limited)
        mean, p99 = (_ratio_to_direct(rows, case, load, name) for name in _TO_DIRECT)
        found.setdefault((case.partition(", ")[0], load), []).append(
            (mean, p99, light, _work(rows, case, load))
        )
    lines = [
        [kind, load, *(f"{min(column):.2f} to {max(column):.2f}" for column in zip(*cells, strict=True))]
        for (kind, load), cells in found.items()
    ]
    return markdown(head, lines, text_columns=2)


_RATIOS = (
    "Ratios of first tokens, after the first 30 s and 200 requests. Mean and P99 are to the better of "
    "alternating and least in flight, and work too. Light tenants, short prompts and the first 30 s are to a "
    "scheduler with the limit configured, or to the same clients where there is none"
)

TABLES = {
    "headline": Table(text=_headline, note=f"Least and largest of the cases of each kind. {_RATIOS}"),
    "ratios": Table(text=_all_ratios, note=f"{_RATIOS}; the most requests at one server"),
    "seconds": Table(text=_seconds, note="Mean and P99 of first tokens from arrival, in seconds"),
}
