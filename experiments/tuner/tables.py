"""Tables of this experiment."""

from collections.abc import Sequence
from statistics import fmean, median

from experiments.common.rows import Row
from experiments.common.tables import Table, markdown, plus_minus

_METHODS = {
    "tpe": "TPE in the twin",
    "random": "random search in the twin",
    "live": "the paper's live loop",
}
_NOTE = "Means over seeds with their 95 % intervals; the reward is at most 1"


def _bad_start(rows: Sequence[Row]) -> str:
    head = [
        *("search", "gain in reward", "of the best found, %", "to 95 % of it, median"),
        *("recommended", "candidates", "worst candidate in production"),
    ]
    return markdown(head, [[_name(row), *_cells(row)] for row in rows])


def _headline(rows: Sequence[Row]) -> str:
    head = [
        *("search", "gain in reward", "of the best found, %", "time to 95 % of it, median"),
        "worst candidate in production",
    ]
    lines = []
    for row in rows:
        gain, share, time, *_, exposed = _cells(row)
        lines.append([_name(row), gain, share, time, exposed])
    return markdown(head, lines)


def _good_start(rows: Sequence[Row]) -> str:
    lines = [
        [_name(row), plus_minus(row.figures["gain"], 3), _recommended(row), _candidates(row)] for row in rows
    ]
    return markdown(["search", "gain in reward", "recommended", "candidates"], lines)


def _name(row: Row) -> str:
    return f"{row.key['workload']}: {_METHODS[str(row.key['method'])]}"


def _cells(row: Row) -> list[str]:
    figures = row.figures
    shares = [
        gain / best for gain, best in zip(figures["gain"], figures["best_gain"], strict=True) if best > 0
    ]
    exposed = [value for value in figures["worst_trial"] if value is not None]
    return [
        plus_minus(figures["gain"], 3),
        plus_minus(shares, 0, scale=100),
        _arrived(figures["arrived_s"]),
        _recommended(row),
        _candidates(row),
        plus_minus(exposed, 3) if exposed else "none",
    ]


def _arrived(seconds: Sequence[float | None]) -> str:
    known = [value for value in seconds if value is not None]
    if not known:
        return f"never (0 of {len(seconds)})"
    middle = median(known)
    time = f"{middle:.1f} s" if middle < 120 else f"{middle / 60:.0f} min"
    return f"{time} ({len(known)} of {len(seconds)})"


def _recommended(row: Row) -> str:
    verdicts = [verdict for verdict in row.figures["confident"] if verdict is not None]
    return f"{sum(verdicts)} of {len(verdicts)}" if verdicts else "no verdict"


def _candidates(row: Row) -> str:
    return f"{fmean(row.figures['trials']):.0f}"


TABLES = {
    "headline": Table(text=_headline, where={"start": "bad"}, note=_NOTE),
    "bad-start": Table(text=_bad_start, where={"start": "bad"}, note=_NOTE),
    "good-start": Table(text=_good_start, where={"start": "good"}, note=_NOTE),
}
