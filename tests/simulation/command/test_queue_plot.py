from dataclasses import replace

import numpy as np
import pytest

from serve_app.errors import Outcome
from serve_app.metrics.record import RequestRecord
from serve_app.scheduling.policies.partition import LengthInterval, Partition
from serve_app.simulation.command import queue_plot
from serve_app.simulation.fleet import FleetSettings
from serve_app.simulation.run import RunResult, RunSettings, simulate
from serve_app.simulation.workload import TraceChoice


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


def test_the_number_waiting_is_the_time_waited_by_the_width_of_each_bin() -> None:
    edges = np.array([0.0, 1.0, 2.0, 3.0])
    records = [waiting_record(0.5, 1.5), waiting_record(1.0, 3.0), waiting_record(2.0, 2.0)]
    assert queue_plot._waiting(records, edges) == pytest.approx([0.5, 1.5, 1.0])


def test_queues_stand_in_the_order_of_their_prompts() -> None:
    records = [
        waiting_record(0.0, 1.0, prompt_tokens=tokens, queue=queue)
        for queue, tokens in (("b", 3_000), ("a", 700), ("c", 20), ("b", 3_100))
    ]
    assert list(queue_plot._rows(records)) == ["c", "a", "b"]


def test_too_many_queues_are_drawn_by_length() -> None:
    records = [
        waiting_record(0.0, 1.0, prompt_tokens=64 + place, queue=f"bubble-{place}") for place in range(60)
    ]
    rows = queue_plot._rows(records)
    assert list(rows) == ["64-91 tokens", "91-128 tokens"]
    assert sum(map(len, rows.values())) == 60


def learned(*bounds: tuple[int, int]) -> Partition:
    return Partition(
        tuple(
            LengthInterval(min_tokens=low, max_tokens=high, mean_tokens=(low + high) / 2, count=1)
            for low, high in bounds
        )
    )


def test_rows_are_the_learned_queues_and_what_lies_above_each() -> None:
    records = [
        waiting_record(0.0, 1.0, prompt_tokens=tokens, queue=queue)
        for queue, tokens in (("64-127", 90), ("~300-800", 500), ("1000-1500", 1_200), ("1-31", 5))
    ]
    rows = queue_plot._by_learned_queue(records, learned((50, 100), (1_000, 1_500), (2_000, 3_000)))
    assert {name: [record.prompt_tokens for record in members] for name, members in rows.items()} == {
        "50-100": [90, 500, 5],
        "1,000-1,500": [1_200],
        "2,000-3,000": [],
    }


def run_result() -> RunResult:
    run = RunSettings(
        policy="ewsjf",
        fleet=FleetSettings(profile="laptop"),
        trace=TraceChoice(name="paper-mix", requests=120),
        rate_per_s=30.0,
    )
    return simulate(run)


def test_a_picture_shows_learned_queues_and_when_they_were_learned() -> None:
    plain = run_result()
    changes = ((0.0, learned((1, 500))), (1.5, learned((30, 260), (1_000, 5_000))))
    figure = queue_plot.queue_figure(replace(plain, partitions=changes), "title")
    above = figure.axes[0]
    assert [label.get_text() for label in above.get_yticklabels()] == ["30-260", "1,000-5,000"]
    marked = [line for line in above.get_lines() if line.get_label() == "queues learned"]
    # What is given from the beginning is no change.
    assert [float(line.get_xdata()[0]) for line in marked] == [1.5]  # type: ignore[index,arg-type]
    assert len(above.get_lines()) == len(marked) + 1
    assert len(queue_plot.queue_figure(plain, "title").axes[0].get_lines()) == 1
