from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from serve_app.simulation.command import plots
from serve_app.simulation.fleet import FleetSettings
from serve_app.simulation.run import RunResult, RunSettings, simulate
from serve_app.simulation.workload import TraceChoice

FLEET = FleetSettings(profile="laptop", replicas={"all": 1})


def result(policy: str = "fcfs", **changes: object) -> RunResult:
    run = RunSettings(
        policy=policy, fleet=FLEET, trace=TraceChoice(name="paper-mix", requests=120), rate_per_s=30.0
    )
    return simulate(replace(run, **changes))  # type: ignore[arg-type] # each test names what it changes


def test_pictures_are_written_for_one_seed_and_for_several(tmp_path: Path) -> None:
    results = [result("direct"), result(), result("direct", seed=1), result(seed=1)]
    for chosen, folder in ((results[:2], tmp_path / "one"), (results, tmp_path / "two")):
        written = plots.write_plots(folder, chosen)
        assert sorted(path.name for path in written) == ["frontier.png", "queues-fcfs.png", "ttft_cdf.png"]
        assert all(path.read_bytes().startswith(b"\x89PNG") for path in written)


def test_a_run_without_long_prompts_can_be_drawn(tmp_path: Path) -> None:
    assert len(plots.write_plots(tmp_path, [result(short_at_tokens=100_000)])) == 3


def test_the_frontier_leaves_out_what_another_beats_on_both_axes() -> None:
    from matplotlib.figure import Figure

    axes = Figure().subplots()
    plots._draw_front(axes, [(1.0, 3.0), (2.0, 2.0), (2.5, 2.5), (3.0, 1.0)])
    (line,) = axes.get_lines()
    assert line.get_xydata() == pytest.approx(np.array([[1.0, 3.0], [2.0, 2.0], [3.0, 1.0]]))
