"""Tables of this experiment."""

import re
from collections.abc import Mapping, Sequence

from experiments.common.rows import Row, where
from experiments.common.tables import Column, Computed, Table, line_per_row

_SCENES = {
    "late_user": "One user sends 100 prompts of 1,000 words at once, another user one prompt 0.5 s later",
    "conversations": "Eight conversations of six turns",
    "agents": "Twelve recorded conversations of coding agents at once",
    "tenants": "One heavy tenant with half of the requests, all long, and 26 light ones, in overload",
    "batch": "32 connections with long outputs in the batch class, beside the mix at half of the capacity",
    "floors": "Three tenants with floors of 8,000, 1,500 and 4,000 tokens/s, of which the last needs little, "
    "and a flood of five tenants without one",
    "killed": "A server is killed at one third of the run, at half of the capacity",
    "stopped": "A server is stopped, with its connections open, at one third of the run",
    "slow": "One server takes twice as long, at half of the capacity",
}
_PRICE = Column("ms per token", "token_ms", 1)
_MIX = (
    *(
        Column(f"{kind} TTFT, {name}, s", f"{kind}_ttft_{figure}_s", digits)
        for kind in ("short", "long")
        for name, figure, digits in (("mean", "mean", 2), ("P50", "p50", 3), ("P99", "p99", 2))
    ),
    Column("completed/s", "completed_per_s", 1),
    Column("goodput/s", "goodput_per_s", 1),
    Column("errors", "errors", 0),
    _PRICE,
    Column("cores, gateway", "gateway_cores"),
    Column("cores, servers", "server_cores"),
)
_LATE_USER = (
    Column("TTFT of the late user, s", "B_ttft_mean_s"),
    Column("mean TTFT of the first user, s", "A_ttft_mean_s"),
    _PRICE,
)
_FAILURE = (
    Column("errors", "errors", 0),
    Column("short TTFT, mean, s", "short_ttft_mean_s"),
    Column("P99, s", "short_ttft_p99_s"),
    Column("goodput/s", "goodput_per_s", 1),
    _PRICE,
)
_COLUMNS: Mapping[str, Sequence[Column]] = {
    "late_user": _LATE_USER,
    "conversations": (
        Column("later turns: TTFT, mean, s", "later_ttft_mean_s", 3),
        Column("P50, s", "later_ttft_p50_s", 3),
        Column("P99, s", "later_ttft_p99_s", 3),
        Column("cached, %", "later_cached_ratio", 0, 100),
        _PRICE,
    ),
    "agents": (
        Column("turns/min", "completed_per_s", 0, 60),
        Column("cached, %", "turn_cached_ratio", 0, 100),
        Column("TTFT, mean, s", "turn_ttft_mean_s"),
        Column("P50, s", "turn_ttft_p50_s"),
        Column("P99, s", "turn_ttft_p99_s", 1),
    ),
    "tenants": (
        Column("light tenants: TTFT, mean, s", "light_ttft_mean_s"),
        Column("P99, s", "light_ttft_p99_s"),
        Column("heavy tenant: TTFT, P99, s", "heavy_ttft_p99_s", 1),
        Column("completed/s", "completed_per_s", 1),
        _PRICE,
    ),
    "batch": (
        Column("short TTFT, mean, s", "short_ttft_mean_s"),
        Column("P99, s", "short_ttft_p99_s"),
        Column("batch tokens/s", "batch_tokens_per_s", 0),
        _PRICE,
    ),
    "floors": (
        *(
            Column(f"{tenant}: tokens of service/s", f"{tenant}_service_per_s", 0)
            for tenant in ("large", "small", "idle", "flood")
        ),
        *(
            Column(f"{tenant}: TTFT, mean, s", f"{tenant}_ttft_mean_s")
            for tenant in ("large", "small", "idle", "flood")
        ),
        Column("completed/s", "completed_per_s", 1),
    ),
    "killed": _FAILURE,
    "stopped": _FAILURE,
    "slow": _FAILURE,
}


def _headline(rows: Sequence[Row]) -> str:
    """Return the load nearest to the capacity."""
    load = min((float(row.key["load"]) for row in rows), key=lambda one: abs(one - 1.0))
    mine = where(rows, load=load, profile=rows[0].key["profile"])
    text = line_per_row({"system": _named}, [_without_interval(column) for column in _SUMMARY])(mine)
    return f"{text}\n\nLoad {load:g} of the capacity, {mine[0].settings['scenes']['mix']['seconds']:g} s."


def _without_interval(column: Column | Computed) -> Computed:
    return Computed(column.heading, lambda row: re.sub(r" ± [\d.,]+", "", column.cell(row)))


def _mean_and_p99(kind: str) -> Computed:
    mean, p99 = Column("", f"{kind}_ttft_mean_s"), Column("", f"{kind}_ttft_p99_s")
    return Computed(f"{kind} prompts: TTFT, mean / P99, s", lambda row: f"{mean.cell(row)} / {p99.cell(row)}")


_SUMMARY: Sequence[Column | Computed] = (
    _mean_and_p99("short"),
    _mean_and_p99("long"),
    _PRICE,
    Column("goodput/s", "goodput_per_s", 1),
)


def _scenes(rows: Sequence[Row]) -> str:
    """Return a table for each scene."""
    texts = []
    for scene, columns in _COLUMNS.items():
        if mine := where(rows, scene=scene):
            texts.append(f"{_SCENES[scene]}:\n\n{line_per_row({'system': _named}, columns)(mine)}")
    return "\n\n".join(texts)


def _named(row: Row) -> str:
    return f"{row.key['system']} {row.figures['version'][0]}".strip()


def _placed(row: Row) -> str:
    """Return the GPU and the load."""
    return f"{str(row.key['profile']).split('-')[-2].upper()}, {row.key['load']:g}"


_NOTE = (
    "vLLM's own server and scheduler with the step times of the profile; client, gateway and servers share "
    "the machine. Means over seeds with their 95 % intervals. Goodput: first token within 1 s, of long "
    "prompts within 4 s"
)

TABLES = {
    "headline": Table(
        text=_headline,
        where={"scene": "mix"},
        note=_NOTE.replace(" with their 95 % intervals", ""),
        shows_load=True,
    ),
    "loads": Table(
        text=line_per_row({"GPU, load": _placed, "system": _named}, _SUMMARY),
        where={"scene": "mix"},
        note=_NOTE,
        shows_load=True,
    ),
    "load": Table(
        text=line_per_row({"GPU, load": _placed, "system": _named}, _MIX),
        where={"scene": "mix"},
        note=_NOTE,
        shows_load=True,
    ),
    "late_user": Table(
        text=line_per_row({"system": _named}, _LATE_USER),
        where={"scene": "late_user"},
        note=_NOTE,
        shows_load=True,
    ),
    "scenes": Table(text=_scenes, where={"scene": tuple(_COLUMNS)}, note=_NOTE, shows_load=True),
}
