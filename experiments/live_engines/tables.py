"""The tables of this experiment."""

from collections.abc import Iterator, Mapping, Sequence

from experiments.common.rows import Row
from experiments.common.tables import Table, load_note, markdown, plus_minus

# Heading, figure, decimals, scale.
Columns = Sequence[tuple[str, str, int, float]]

_MEANS: Columns = (
    ("short TTFT mean, s", "short_ttft_mean_s", 2, 1.0),
    ("long mean, s", "long_ttft_mean_s", 2, 1.0),
)
_CLIENTS: Columns = (
    _MEANS[0],
    ("short p50, s", "short_ttft_p50_s", 2, 1.0),
    ("short p99, s", "short_ttft_p99_s", 2, 1.0),
    _MEANS[1],
    ("long p50, s", "long_ttft_p50_s", 2, 1.0),
    ("long p99, s", "long_ttft_p99_s", 2, 1.0),
    ("longest wait, s", "queue_wait_max_s", 1, 1.0),
    ("TPOT, ms", "tpot_mean_s", 0, 1_000.0),
    ("goodput, 1/s", "goodput_per_s", 2, 1.0),
    ("tokens/s", "tokens_per_s", 0, 1.0),
)
_ENGINE: Columns = (
    ("gateway wait mean, s", "gateway_wait_mean_s", 2, 1.0),
    ("engine wait mean, s", "engine_wait_mean_s", 2, 1.0),
    ("steps", "steps", 0, 1.0),
    ("tokens per step", "tokens_per_step", 1, 1.0),
    ("preemptions", "preemptions", 0, 1.0),
    ("cores of the engine", "engine_cores", 2, 1.0),
)


def _headline(rows: Sequence[Row]) -> str:
    return _with_notes(rows, _text(rows, _MEANS))


def _clients(rows: Sequence[Row]) -> str:
    return _with_notes(rows, _text(rows, _CLIENTS))


def _engine(rows: Sequence[Row]) -> str:
    return _text(rows, _ENGINE)


def _differences(rows: Sequence[Row]) -> str:
    """Each variant less the first one, repeat by repeat."""
    first, *others = rows
    lines = [[_policy(row), *_cells(_less(row.figures, first.figures, _CLIENTS), _CLIENTS)] for row in others]
    return markdown([f"less {_policy(first)}", *(heading for heading, *_ in _CLIENTS)], lines)


def _text(rows: Sequence[Row], columns: Columns) -> str:
    lines = [[_policy(row), *_cells(row.figures, columns)] for row in rows]
    return markdown(["policy", *(heading for heading, *_ in columns)], lines)


def _cells(figures: Mapping[str, Sequence[float | None]], columns: Columns) -> list[str]:
    return [plus_minus(figures[name], decimals, scale=scale) for _, name, decimals, scale in columns]


def _less(
    figures: Mapping[str, Sequence[float | None]],
    others: Mapping[str, Sequence[float | None]],
    columns: Columns,
) -> dict[str, list[float | None]]:
    return {
        name: [
            None if mine is None or theirs is None else mine - theirs
            for mine, theirs in zip(figures[name], others[name], strict=True)
        ]
        for _, name, *_ in columns
    }


def _policy(row: Row) -> str:
    return str(row.key["policy"])


def _with_notes(rows: Sequence[Row], table: str) -> str:
    notes = [*unequal_work(rows), load_note(rows)]
    return "\n\n".join((table, " ".join(note for note in notes if note))).rstrip()


def unequal_work(rows: Sequence[Row]) -> Iterator[str]:
    """A sentence for each run that did not do the work of the others in its repeat."""
    for row in rows:
        for repeat, done in enumerate(row.figures["completed"]):
            asked = row.figures["requests"][repeat]
            if done < asked:
                yield f"Not the same work: {_policy(row)}, repeat {repeat}: {done} of {asked} completed."
    for name in ("prompt_tokens", "output_tokens"):
        for repeat, tokens in enumerate(zip(*(row.figures[name] for row in rows), strict=True)):
            if len(set(tokens)) > 1:
                yield f"Not the same work in repeat {repeat}: {name.replace('_', ' ')} {tokens}."


_NOTE = "Live, vLLM on the CPU. Means over repeats with their 95 % intervals; TTFT counts from arrival"

TABLES = {
    "headline": Table(text=_headline, note=_NOTE),
    "clients": Table(text=_clients, note=_NOTE),
    "engine": Table(text=_engine, note=_NOTE),
    "differences": Table(text=_differences, note=f"Paired by repeat. {_NOTE}"),
}
