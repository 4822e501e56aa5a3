"""Rows without a run, and a package with one small experiment."""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from experiments.common.provenance import Machine, TraceSource
from experiments.common.rows import Key, Row, line_of

MACHINE = Machine(
    processor="A CPU", cores=2, memory_gib=7.6, system="Linux", python="3.11.9", load_average=(0.5, 0.4, 0.3)
)


def row(
    key: Key | None = None,
    figures: Mapping[str, Any] | None = None,
    *,
    experiment: str = "coin",
    seeds: Sequence[int] = (0, 1, 2),
    traces: Sequence[TraceSource] = (),
    commit: str | None = "0123456789abcdef",
    measured_at: str = "2025-01-02T03:04:05+00:00",
    settings: Mapping[str, Any] | None = None,
) -> Row:
    return Row(
        experiment=experiment,
        key=key or {},
        figures=figures or {},
        seeds=tuple(seeds),
        traces=tuple(traces),
        settings=settings or {"flips": 10},
        commit=commit,
        machine=MACHINE,
        measured_at=measured_at,
    )


RUN = '''"""How often does a coin fall on its face?

More about it.
"""

import random
from collections.abc import Iterator
from pathlib import Path

from experiments.common.experiment import Context, Experiment, Measurement
from serve_app.core.settings_base import settings


@settings
class CoinSettings:
    flips: int
    biases: tuple[float, ...]
    seeds: int = 3
    log: Path


def play(settings: CoinSettings, context: Context) -> Iterator[Measurement]:
    for bias in settings.biases:
        if context.has({"bias": bias}):
            continue
        with settings.log.open("a") as log:
            log.write(f"{bias}\\n")
        if bias > 1:
            raise ValueError(f"a bias is at most 1, got {bias}")
        shares = []
        for seed in range(settings.seeds):
            rng = random.Random(seed)
            shares.append(sum(rng.random() < bias for _ in range(settings.flips)) / settings.flips)
        yield Measurement(key={"bias": bias}, seeds=range(settings.seeds), figures={"share": shares})


EXPERIMENT = Experiment(settings=CoinSettings, play=play)
'''

TABLES = '''"""Tables."""

from experiments.common.picture import Line, Panel, drawn
from experiments.common.tables import Table, markdown, plus_minus


def shares(rows):
    lines = [[str(row.key["bias"]), plus_minus(row.figures["share"])] for row in rows]
    return markdown(["bias", "share"], lines)


def picture(rows_of):
    rows = rows_of("coin")
    line = Line("share", [row.figures["share"][0] for row in rows])
    return drawn("Coins", "Their shares", [Panel(title="By bias", ticks=["a"] * len(rows), lines=[line])])


TABLES = {"shares": Table(text=shares), "fair": Table(text=shares, where={"bias": 0.5})}
PICTURES = {"docs/coins.svg": picture}
'''


def write_package(root: Path, name: str) -> Path:
    """Write a package of experiments, importable once `root` is on the path; return its folder."""
    package = root / name
    coin = package / "coin"
    coin.mkdir(parents=True)
    (package / "__init__.py").write_text("")
    (coin / "__init__.py").write_text("")
    (coin / "run.py").write_text(RUN)
    (coin / "tables.py").write_text(TABLES)
    (coin / "config.yaml").write_text(
        f"flips: 100\nbiases: [0.5, 0.75]\nlog: {root / 'log'}\nquick: {{flips: 10}}\n"
    )
    return package


def write_rows(path: Path, rows: Iterable[Row]) -> None:
    """Replace a file."""
    path.write_text("".join(f"{line_of(row)}\n" for row in rows), encoding="utf-8")
