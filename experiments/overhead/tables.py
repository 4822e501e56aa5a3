"""The tables of this experiment."""

from collections.abc import Sequence
from statistics import median

from experiments.common.rows import ANY, Row
from experiments.common.tables import Table, load_note, markdown

_ENGINE = "engine"
# Learns beside the requests, now and then: its work is no part of a request.
_TUNER = "tuner"
_ROLES = ("gateway", "haproxy", "scheduler", "serve", "ray")


def _headline(rows: Sequence[Row]) -> str:
    head = ["request", "clients", "CPU of the layer, ms", "first token straight, ms", "added, ms"]
    lines = [
        [str(row.key["kind"]), str(row.key["clients"]), f"{layer_ms(row):.2f}", *_first(row)] for row in rows
    ]
    return f"{markdown(head, lines)}\n\n{_circumstances(rows)}"


def _parts(rows: Sequence[Row]) -> str:
    head = [
        "request",
        "clients",
        "straight, 1/s",
        "through, 1/s",
        *_ROLES,
        "all of the layer",
        _TUNER,
        _ENGINE,
    ]
    lines = [
        [
            str(row.key["kind"]),
            str(row.key["clients"]),
            *(f"{median(row.figures[name]):,.0f}" for name in ("straight_per_s", "per_s")),
            *(f"{median(row.figures['cpu_ms'].get(role, [0.0])):.2f}" for role in _ROLES),
            f"{layer_ms(row):.2f}",
            *(f"{median(row.figures['cpu_ms'].get(role, [0.0])):.2f}" for role in (_TUNER, _ENGINE)),
            f"{median(row.figures['alone_cpu_ms']):.2f}",
            f"{median(row.figures['reads']):.1f}",
        ]
        for row in rows
    ]
    return f"{markdown([*head, _TUNER, _ENGINE, 'engine alone', 'reads'], lines)}\n\n{_circumstances(rows)}"


def layer_ms(row: Row) -> float:
    """CPU milliseconds per request of every process but engine and tuner, median over the repeats."""
    used = [values for role, values in row.figures["cpu_ms"].items() if role not in (_ENGINE, _TUNER)]
    return median(map(sum, zip(*used, strict=True)))


def _first(row: Row) -> list[str]:
    straight, through = row.figures["straight_first_ms"], row.figures["first_ms"]
    added = median(mine - theirs for mine, theirs in zip(through, straight, strict=True))
    return [f"{median(straight):.2f}", f"{added:.2f}"]


def _circumstances(rows: Sequence[Row]) -> str:
    settings = rows[0].settings
    kinds = [
        f"{name} asks for {kind['output_tokens']}, {'streamed' if kind['stream'] else 'not streamed'}"
        for name, kind in settings["kinds"].items()
    ]
    tokens = f"Of tokens, {'; '.join(kinds)}"
    return f"Medians of {settings['repeats']} repeats. {tokens}. {load_note(rows)}".rstrip()


_NOTE = "Live, one emulated engine; client, engine and application share the machine"

TABLES = {
    "headline": Table(text=_headline, where={"kind": ANY}, note=_NOTE),
    "parts": Table(text=_parts, where={"kind": ANY}, note=f"CPU milliseconds per request by role. {_NOTE}"),
}
