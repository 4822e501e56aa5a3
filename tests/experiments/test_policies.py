"""The experiment `policies`: its grid, its rows and tables, and its disturbances."""

import math
from dataclasses import replace
from pathlib import Path
from random import Random

import pytest

from experiments.common.config import read_settings
from experiments.common.experiment import Context, Experiment
from experiments.common.rows import Row, read_rows
from experiments.common.run_command import partial_of, play
from experiments.policies.grid import (
    FlippedMix,
    LengthNoise,
    PolicyCase,
    PolicyGrid,
    PolicyVariant,
    cells_of,
    planned,
    play_grid,
)
from experiments.policies.orders import orders_of, play_points
from experiments.policies.tables import COLUMNS, grid_table
from serve_app.core.metrics.summary import interval_95
from serve_app.errors import SettingsError
from serve_app.lab.simulation.run import EngineChanges, simulate
from serve_app.lab.workloads import TraceError
from tests.experiments.builders import row
from tests.lab.simulation.test_run import TRACE, settings

SMALL = PolicyGrid(
    profiles=("laptop",),
    replicas=1,
    seeds=2,
    requests=80,
    variants={
        "fcfs": PolicyVariant(),
        "oracle": PolicyVariant(),
        "chunked": PolicyVariant(policy="fcfs", engine=EngineChanges(long_prefill_token_threshold=64)),
    },
    cases=(
        PolicyCase(trace="paper-mix", loads=(0.5, 1.0)),
        PolicyCase(name="noisy", trace="lmsys", loads=(0.9,), length_noise=0.3),
    ),
)


@pytest.mark.slow
def test_every_variant_meets_every_load_with_every_seed_at_one_rate() -> None:
    cells = list(cells_of(SMALL))
    plan = planned(SMALL, cells, jobs=1)
    assert sum(map(len, plan)) == 3 * 2 * 2 + 3 * 2
    rates: dict[tuple[str, float, int], set[float | None]] = {}
    for cell, runs in zip(cells, plan, strict=True):
        assert [run.seed for run in runs] == [0, 1]
        for run in runs:
            assert run.name == cell.variant
            expected = LengthNoise(relative_error=0.3) if cell.case.title == "noisy" else None
            assert run.estimator == expected
            rates.setdefault((cell.case.title, cell.load, run.seed), set()).add(run.rate_per_s)
    assert all(len(one) == 1 for one in rates.values())
    (half,), (full,) = rates["paper-mix", 0.5, 0], rates["paper-mix", 1.0, 0]
    assert half is not None
    assert full == pytest.approx(2 * half)


def test_a_case_can_choose_variants_and_profiles() -> None:
    case = PolicyCase(
        trace="paper-mix", loads=(0.5,), variants=("chunked",), profiles=("llama2-70b-h100-tp4",)
    )
    part = PolicyGrid(profiles=SMALL.profiles, variants=SMALL.variants, cases=(case,))
    assert [(cell.variant, cell.profile) for cell in cells_of(part)] == [("chunked", "llama2-70b-h100-tp4")]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("profiles: [laptop]\nvariants: {fcfs: {}}\ncases: [{trace: paper-mix, load: [1]}]", "load"),
        ("profiles: [laptop]\nvariants: {fcfs: {engine: {chunk: 3}}}\ncases: []", "chunk"),
        ("profiles: []\nvariants: {}\ncases: []", "at least one"),
        (
            "profiles: [laptop]\nvariants: {best: {policy: lifo}}\ncases: [{trace: paper-mix, loads: [1]}]",
            "variant 'best' has no policy",
        ),
        (
            "profiles: [laptop]\nvariants: {fcfs: {}}\ncases: [{trace: a, loads: [1], variants: [quiet]}]",
            "the grid has no variant 'quiet': it has fcfs",
        ),
        ("{", "is no configuration"),
        ("3", "holds no mapping"),
    ],
)
def test_a_file_that_is_no_grid_is_rejected_by_name(text: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    path.write_text(text)
    with pytest.raises(SettingsError, match=message):
        read_settings(path, PolicyGrid)


# -- contents of rows, resumption, and tables -------------------------------------------------------------

GRID = replace(SMALL, cases=SMALL.cases[:1])
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
    case = PolicyCase(trace="paper-mix", loads=(0.5,), variants=("chunked",))
    (row,) = play_grid(replace(SMALL, replicas=2, requests=60, cases=(case,)), Context(jobs=1))
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
    variants = {"fcfs": PolicyVariant(), "ewsjf, no bound": PolicyVariant(policy="ewsjf")}
    small = replace(GRID, requests=60, variants=variants)
    single = list(play_grid(small, Context(jobs=1)))
    points = list(play_points(small, Context(jobs=1)))
    assert [one.key["load"] for one in points] == [0.5, 1.0]
    rows = [row(figures=one.figures, key=one.key, seeds=one.seeds) for one in points]
    for order, own in zip(orders_of(rows), single, strict=True):
        assert (order.policy, order.load) == (own.key["policy"], own.key["load"])
        for column in COLUMNS:
            wanted = interval_95(own.figures[column.figure])
            assert order.mean(column.figure) == wanted.mean
            if order.figures[column.figure] != own.figures[column.figure]:
                assert wanted.high is not None
                assert order.figures[column.figure] == [wanted.mean, wanted.high - wanted.mean]
    # Measured points are not run again.
    later = list(play_points(small, Context(jobs=1, kept=(points[0].key,))))
    assert [one.key for one in later] == [points[1].key]


# -- disturbances -----------------------------------------------------------------------------------------


def test_noise_changes_what_the_scheduler_sees_and_nothing_that_engines_do() -> None:
    exact, noisy = (
        simulate(settings("fcfs", estimator=LengthNoise(relative_error=error))) for error in (0.0, 0.5)
    )
    true_lengths = [record.prompt_tokens for record in exact.records]
    assert [record.prompt_tokens for record in noisy.records] == true_lengths
    assert noisy.whole.completed == 300
    ratios = sorted(
        (mistaken.estimated_tokens or 0) / (right.estimated_tokens or 1)
        for mistaken, right in zip(noisy.records, exact.records, strict=True)
    )
    assert ratios[0] < 0.95
    assert ratios[-1] > 1.05


def test_noise_is_log_normal_around_the_truth() -> None:
    factors = LengthNoise(relative_error=0.3).factors(map(str, range(4_000)), Random(1))
    logs = [math.log(factor) for factor in factors.values()]
    mean = sum(logs) / len(logs)
    deviation = math.sqrt(sum((one - mean) ** 2 for one in logs) / len(logs))
    assert mean == pytest.approx(0.0, abs=0.02)
    assert deviation == pytest.approx(0.3, rel=0.05)


def test_a_flipped_mix_exchanges_shares_after_the_middle() -> None:
    flipped = FlippedMix(256)(TRACE, 0)
    halves = flipped.requests[:2_000], flipped.requests[2_000:]
    shares = [sum(one.prompt_tokens > 256 for one in half) / 2_000 for half in halves]
    assert shares == pytest.approx([0.2, 0.8], abs=0.03)
    assert halves[0] == TRACE.requests[:2_000]
    assert [one.arrival_s for one in flipped.requests] == [one.arrival_s for one in TRACE.requests]


def test_a_trace_of_one_kind_has_no_mix_to_flip() -> None:
    with pytest.raises(TraceError, match="cannot flip the mix"):
        FlippedMix(10)(TRACE, 0)
