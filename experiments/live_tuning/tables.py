"""The tables of this experiment."""

from collections.abc import Sequence

from experiments.common.rows import Row
from experiments.common.tables import Table, load_note, markdown

_PHASES = ("before", "trial", "after")
_TITLES = {
    "defaults": "the defaults, untuned",
    "winner": "no isolation and no order, searched in the twin",
    "poisoned": "the defaults, a poisoned search",
}
_VERDICTS = {"winner": "adopted", "poisoned": "taken back"}


def _headline(rows: Sequence[Row]) -> str:
    head = ["case", "verdict", "tried after, s", "verdict after, s", "requests", "not completed"]
    return f"{markdown([*head, *_rewards()], map(_case, rows), text_columns=2)}\n\n{load_note(rows)}".rstrip()


def _rewards() -> list[str]:
    return [f"reward {phase}" for phase in ("before", "in the trial", "after")]


def _case(row: Row) -> list[str]:
    figures, case = row.figures, str(row.key["case"])
    outcomes = figures["outcomes"]
    requests = sum(outcomes.values())
    return [
        _TITLES[case],
        "none" if figures["verdict_s"] is None else _VERDICTS[case],
        _number(figures["started_s"], 0),
        _number(figures["verdict_s"], 0),
        f"{requests:,}",
        f"{requests - outcomes.get('completed', 0):,}",
        *(_number(figures["phases"][phase]["reward"], 2) for phase in _PHASES),
    ]


def _decisions(rows: Sequence[Row]) -> str:
    lines = [
        [str(row.key["case"]), f"{one['at_s']:.0f}", one["what"], one["why"]]
        for row in rows
        for one in row.figures["decisions"]
    ]
    return markdown(["case", "s", "tuner", "why"], lines, text_columns=4)


def _number(value: float | None, decimals: int) -> str:
    return "-" if value is None else f"{value:.{decimals}f}"


_NOTE = "Live, an 8B model's emulated engine; one run of each case"

TABLES = {"headline": Table(text=_headline, note=_NOTE), "decisions": Table(text=_decisions, note=_NOTE)}
