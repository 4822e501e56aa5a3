"""Policy grid: contents of its rows, resumption, and tables."""

from pathlib import Path

import pytest

from experiments.common.experiment import Context, Experiment
from experiments.common.rows import Row, read_rows
from experiments.common.run_command import partial_of, play
from experiments.orders.points import orders_of, play_points
from experiments.policies.grid import PolicyCase, PolicyGrid, PolicyVariant, play_grid
from experiments.policies.tables import COLUMNS, grid_table
from serve_app.core.metrics.summary import interval_95
from serve_app.lab.simulation.run import EngineChanges
from tests.experiments.builders import row

GRID = PolicyGrid(
    profiles=("laptop",),
    replicas=1,
    seeds=2,
    requests=80,
    variants={
        "fcfs": PolicyVariant(),
        "oracle": PolicyVariant(),
        "chunked": PolicyVariant(policy="fcfs", engine=EngineChanges(long_prefill_token_threshold=64)),
    },
    cases=(PolicyCase(trace="paper-mix", loads=(0.5, 1.0)),),
)
EXPERIMENT = Experiment(settings=PolicyGrid, play=play_grid)


def figures(rows: list[Row]) -> list[tuple[object, object]]:
    return [(row.key, row.figures) for row in rows]


@pytest.mark.slow
def test_an_interrupted_grid_resumes(tmp_path: Path) -> None:
    out = tmp_path / "out.jsonl"
    rows = play("policies", EXPERIMENT, GRID, out, jobs=1)
    assert [(row.key["load"], row.key["policy"]) for row in rows] == [
        (load, policy) for load in (0.5, 1.0) for policy in ("fcfs", "oracle", "chunked")
    ]
    # The machine failed while the last line was written.
    lines = out.read_text().splitlines()
    partial_of(out).write_text("\n".join(lines[:-3]) + "\n" + lines[-3][:40])
    resumed = play("policies", EXPERIMENT, GRID, out, jobs=1, resume=True)
    assert figures(resumed) == figures(rows)
    assert figures(read_rows(out)) == figures(rows)

    table = grid_table("load")(rows)
    assert table.count("| 0.5 ") == table.count("| 1.0 ") == 3
    assert table.count("oracle (not deployable)") == 2


def test_a_row_has_all_settings_of_its_runs_and_a_figure_for_each_seed() -> None:
    only_fcfs = PolicyGrid(
        profiles=("laptop",),
        replicas=2,
        seeds=2,
        requests=60,
        variants=GRID.variants,
        cases=(PolicyCase(trace="paper-mix", loads=(0.5,), variants=("chunked",)),),
    )
    (row,) = play_grid(only_fcfs, Context(jobs=1))
    assert row.key == {"case": "paper-mix", "profile": "laptop", "load": 0.5, "policy": "chunked"}
    assert list(row.seeds) == [0, 1]
    assert row.figures["requests"] == row.figures["completed"] == [60, 60]
    assert all(len(row.figures[column.figure]) == 2 for column in COLUMNS)
    assert row.settings is not None
    assert row.settings["policy"] == "fcfs"
    assert row.settings["engines"][0]["long_prefill_token_threshold"] == 64
    assert [source.sha256 for source in row.traces] == [None]


@pytest.mark.slow
def test_a_row_of_a_point_has_the_figures_of_every_orders_own_row() -> None:
    small = PolicyGrid(
        profiles=("laptop",),
        replicas=1,
        seeds=2,
        requests=60,
        variants={"fcfs": PolicyVariant(), "ewsjf, no bound": PolicyVariant(policy="ewsjf")},
        cases=(PolicyCase(trace="paper-mix", loads=(0.5, 1.0)),),
    )
    single = list(play_grid(small, Context(jobs=1)))
    points = list(play_points(small, Context(jobs=1)))
    assert [one.key["load"] for one in points] == [0.5, 1.0]
    rows = [row(figures=one.figures, key=one.key, seeds=one.seeds) for one in points]
    for order, own in zip(orders_of(rows), single, strict=True):
        assert (order.policy, order.load) == (own.key["policy"], own.key["load"])
        assert order.deployable is own.figures["deployable"] is True
        for column in COLUMNS:
            wanted = interval_95(own.figures[column.figure])
            assert order.interval(column.figure).as_text(4) == wanted.as_text(4)
    # Measured points are not run again.
    later = list(play_points(small, Context(jobs=1, kept=(points[0].key,))))
    assert [one.key for one in later] == [points[1].key]
