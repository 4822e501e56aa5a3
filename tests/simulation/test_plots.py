from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from serve_app.errors import Outcome
from serve_app.metrics.record import RequestRecord
from serve_app.simulation import plots
from serve_app.simulation.fleet import FleetSettings
from serve_app.simulation.run import RunResult, RunSettings, simulate
from serve_app.simulation.workload import TraceChoice

FLEET = FleetSettings(profile="laptop", replicas={"all": 1})


def result(policy: str = "fcfs", **changes: object) -> RunResult:
    run = RunSettings(
        policy=policy, fleet=FLEET, trace=TraceChoice(name="paper-mix", requests=120), rate_per_s=30.0
    )
    return simulate(replace(run, **changes))  # type: ignore[arg-type] # each test names what it changes


def waiting_record(
    arrived_at: float, dispatched_at: float, *, prompt_tokens: int = 100, queue: str = "q"
) -> RequestRecord:
    return RequestRecord(
        request_id=f"{arrived_at}-{prompt_tokens}",
        arrived_at=arrived_at,
        dispatched_at=dispatched_at,
        finished_at=dispatched_at + 1.0,
        outcome=Outcome.COMPLETED,
        prompt_tokens=prompt_tokens,
        output_tokens=10,
        length_queue=queue,
    )


def test_pictures_are_written_for_one_seed_and_for_several(tmp_path: Path) -> None:
    results = [result("direct"), result(), result("direct", seed=1), result(seed=1)]
    for chosen, folder in ((results[:2], tmp_path / "one"), (results, tmp_path / "two")):
        written = plots.write_plots(folder, chosen)
        assert sorted(path.name for path in written) == ["frontier.png", "queues-fcfs.png", "ttft_cdf.png"]
        assert all(path.read_bytes().startswith(b"\x89PNG") for path in written)


def test_a_run_without_long_prompts_can_be_drawn(tmp_path: Path) -> None:
    assert len(plots.write_plots(tmp_path, [result(short_at_tokens=100_000)])) == 3


def test_the_number_waiting_is_the_time_waited_by_the_width_of_each_bin() -> None:
    edges = np.array([0.0, 1.0, 2.0, 3.0])
    records = [waiting_record(0.5, 1.5), waiting_record(1.0, 3.0), waiting_record(2.0, 2.0)]
    assert plots._waiting(records, edges) == pytest.approx([0.5, 1.5, 1.0])


def test_queues_stand_in_the_order_of_their_prompts() -> None:
    records = [
        waiting_record(0.0, 1.0, prompt_tokens=tokens, queue=queue)
        for queue, tokens in (("b", 3_000), ("a", 700), ("c", 20), ("b", 3_100))
    ]
    assert list(plots._rows(records)) == ["c", "a", "b"]


def test_too_many_queues_are_drawn_by_length() -> None:
    records = [
        waiting_record(0.0, 1.0, prompt_tokens=64 + place, queue=f"bubble-{place}") for place in range(60)
    ]
    rows = plots._rows(records)
    assert list(rows) == ["64-91 tokens", "91-128 tokens"]
    assert sum(map(len, rows.values())) == 60


def test_the_frontier_leaves_out_what_another_beats_on_both_axes() -> None:
    from matplotlib.figure import Figure

    axes = Figure().subplots()
    plots._draw_front(axes, [(1.0, 3.0), (2.0, 2.0), (2.5, 2.5), (3.0, 1.0)])
    (line,) = axes.get_lines()
    assert line.get_xydata() == pytest.approx(np.array([[1.0, 3.0], [2.0, 2.0], [3.0, 1.0]]))
