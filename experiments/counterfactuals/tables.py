"""The tables of this experiment."""

from collections.abc import Sequence

from experiments.common.rows import ANY, Row
from experiments.common.tables import Table, load_note, markdown

_TOLD = ["again, s", "told, s", "nine in ten", "really, s", "inside"]


def _questions(rows: Sequence[Row]) -> str:
    head = ["#", "class", "change", "waited, s", *_TOLD]
    lines = [_line(row, ("class", "change"), "wait") for row in _by_number(rows)]
    return f"{markdown(head, lines, text_columns=3)}\n\n{load_note(rows)}"


def _first_tokens(rows: Sequence[Row]) -> str:
    lines = [_line(row, ("change",), "ttft") for row in _by_number(rows)]
    return markdown(["#", "change", "first token, s", *_TOLD], lines, text_columns=2)


def _by_number(rows: Sequence[Row]) -> list[Row]:
    return sorted(rows, key=lambda row: row.key["number"])


def _line(row: Row, names: Sequence[str], kind: str) -> list[str]:
    """What was asked, and of a wait or a first token: how it was, what was told, and how it came."""
    figures, answer = row.figures, row.figures[kind]
    first, *others = figures[f"unchanged_{kind}_s"]
    return [
        str(row.key["number"]),
        *(figures[name] for name in names),
        f"{first:.1f}",
        ", ".join(f"{one:.1f}" for one in others) or "-",
        f"{answer['predicted_s']:.1f}",
        f"{answer['low_s']:.1f} to {answer['high_s']:.1f}",
        f"{answer['real_s']:.1f}",
        "yes" if answer["inside"] else "no",
    ]


def _all(rows: Sequence[Row]) -> str:
    head = [
        "change",
        "requests",
        "inside",
        "median error, s",
        "median width, s",
        "median change, s",
        "right way",
    ]
    return markdown(head, [_all_line(row) for row in rows])


def _all_line(row: Row) -> list[str]:
    figures = row.figures
    sign = figures["sign_ratio"]
    return [
        str(row.key["change"]),
        str(figures["requests"]),
        f"{figures['inside_ratio']:.0%}",
        f"{figures['median_error_s']:.2f}",
        f"{figures['median_width_s']:.2f}",
        f"{figures['median_change_s']:.2f}",
        "-" if sign is None else f"{sign:.0%}",
    ]


def _unchanged(rows: Sequence[Row]) -> str:
    head = ["difference from the first live run", "median, s", "p90, s"]
    figures = rows[0].figures
    lines = [["the replay of it", f"{figures['replay_median_s']:.2f}", f"{figures['replay_p90_s']:.2f}"]]
    if figures["again_median_s"] is not None:
        again = f"{figures['again_median_s']:.2f}", f"{figures['again_p90_s']:.2f}"
        lines.insert(0, ["the same run again", *again])
    return markdown(head, lines)


TABLES = {
    "questions": Table(
        text=_questions,
        where={"row": "question", "number": ANY},
        note="Live, over HTTP, on emulated engines",
    ),
    "first_tokens": Table(
        text=_first_tokens,
        where={"row": "question", "number": ANY},
        note="Live, over HTTP, on emulated engines",
    ),
    "all": Table(
        text=_all,
        where={"row": "all", "change": ANY},
        note="Live, over HTTP; every request that waited a second or more, or would have",
    ),
    "unchanged": Table(
        text=_unchanged,
        where={"row": "unchanged"},
        note="Live, over HTTP; of the waits of a second or more",
    ),
}
