"""The tables of this experiment."""

from collections.abc import Callable, Sequence
from statistics import fmean

from experiments.common.rows import ANY, Row
from experiments.common.tables import Table, markdown
from experiments.short_prompts.run import WAYS


def _compared(names: Sequence[str], decimals: int) -> Callable[[Sequence[Row]], str]:
    """A table with these figures of each way."""

    def text(rows: Sequence[Row]) -> str:
        return markdown(
            ["engine", "prompts", "load", *WAYS],
            [_line(row, names, decimals) for row in rows],
            text_columns=2,
        )

    return text


def _line(row: Row, names: Sequence[str], decimals: int) -> list[str]:
    figures = (
        " / ".join(f"{fmean(row.figures[f'{way}, {name}']):.{decimals}f}" for name in names) for way in WAYS
    )
    return [*(str(row.key[part]) for part in _EACH), *figures]


_EACH = {"profile": ANY, "traffic": ANY, "load": ANY}
NOTE = "Simulated, one replica, means over seeds"
TABLES = {
    "ttft": Table(text=_compared(("ttft_p50_s", "ttft_p99_s"), 2), where=_EACH, note=NOTE),
    "rates": Table(text=_compared(("requests_per_s",), 1), where=_EACH, note=NOTE),
}
