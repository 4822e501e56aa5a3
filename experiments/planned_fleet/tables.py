"""The tables of this experiment."""

from collections.abc import Sequence
from statistics import fmean

from experiments.common.rows import Row, where
from experiments.common.tables import Table, load_note, markdown, plus_minus

_FIGURES = (
    ("P99 TTFT, s", "p99_ttft_s", 2, 1.0, "slo_ttft_s"),
    ("P99 TPOT, ms", "p99_tpot_s", 0, 1_000.0, "slo_tpot_s"),
)
_SOURCES = ("planned", "simulated", "observed")


def _headline(rows: Sequence[Row]) -> str:
    return _text(rows, ("all",))


def _pools(rows: Sequence[Row]) -> str:
    return _text(rows, ("all", "short", "long"))


def _text(rows: Sequence[Row], groups: Sequence[str]) -> str:
    sources = [where(rows, source=source)[0] for source in _SOURCES]
    lines = [
        [
            heading,
            group,
            *(plus_minus(one.figures[name].get(group, ()), decimals, scale=scale) for one in sources),
            f"{scale * sources[0].settings[limit]:g}" if group == "all" else "-",
        ]
        for heading, name, decimals, scale, limit in _FIGURES
        for group in groups
    ]
    table = markdown(["", "pool", *_SOURCES, "limit"], lines, text_columns=2)
    return f"{table}\n\n{_circumstances(sources[0], sources[2])}"


def _circumstances(planned: Row, observed: Row) -> str:
    figures, settings = observed.figures, observed.settings
    replicas = " and ".join(f"{count} {pool}" for pool, count in planned.figures["plan"]["replicas"].items())
    return (
        f"{replicas} replicas for {settings['rate_per_s']:g} requests/s; live runs of "
        f"{settings['seconds']:g} s. Live, {100 * fmean(figures['within']):.1f} % of requests were within "
        f"both limits, {sum(figures['lost'])} of {sum(figures['requests']):,} did not complete, and the "
        f"client sent {sum(figures['late']):,} late. {load_note([observed])}"
    ).rstrip()


_NOTE = "Emulated engines, Llama-2-70B on four H100. Means over seeds with their 95 % intervals"

TABLES = {"headline": Table(text=_headline, note=_NOTE), "pools": Table(text=_pools, note=_NOTE)}
