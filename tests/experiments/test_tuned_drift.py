from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

import pytest

from experiments.common.catalogue import Catalogue
from experiments.common.config import read_settings
from experiments.common.rows import Row
from experiments.tuned_drift.settings import DriftExperiment
from experiments.tuned_drift.tables import TABLES
from experiments.tuned_drift.traffic import mixed, seconds_of, traffic
from serve_app.lab.simulation.run import ONE_POOL, FleetSettings
from serve_app.lab.workloads import TraceRequest
from tests.experiments.builders import row


def experiment() -> DriftExperiment:
    return read_settings(Catalogue().config("tuned_drift"), DriftExperiment)


def test_lengths_are_of_the_papers_mix_by_kind() -> None:
    arrivals = [(float(place), place % 2 == 1) for place in range(400)]
    drawn = mixed(arrivals, 3)
    for request, (at, is_long) in zip(drawn.requests, arrivals, strict=True):
        least, most = (1_024, 4_096) if is_long else (32, 256)
        assert least <= request.prompt_tokens <= most
        assert 1 <= request.output_tokens <= 512
        assert request.arrival_s == at
    assert drawn == mixed(arrivals, 3)
    assert drawn.requests != mixed(arrivals, 4).requests


def test_the_rate_falls_where_requests_are_long_so_that_the_load_stays() -> None:
    arrived = traffic((0.1, 0.6), (0.1, 0.4), 0.5, 4_000.0, 1).requests
    for half, share, seconds in ((arrived_in(arrived, 0), 0.1, 0.1), (arrived_in(arrived, 2_000), 0.6, 0.4)):
        assert len(half) / 2_000 == pytest.approx(0.5 / seconds, rel=0.08)
        assert sum(one.prompt_tokens > 256 for one in half) / len(half) == pytest.approx(share, abs=0.04)
    assert all(one.arrival_s < other.arrival_s for one, other in pairwise(arrived))


def arrived_in(requests: Sequence[TraceRequest], begin_s: float) -> list[TraceRequest]:
    return [one for one in requests if begin_s <= one.arrival_s < begin_s + 2_000]


@pytest.mark.slow
def test_a_longer_mix_takes_more_of_the_fleet() -> None:
    before_s, after_s = seconds_of((0.1, 0.6), FleetSettings(profile="laptop", replicas={ONE_POOL: 1}))
    assert 0 < before_s < after_s


def test_only_tuned_variants_try_anything_and_they_begin_where_the_fixed_ones_do() -> None:
    played = experiment()
    modes = {name: played.tuner(variant).rollout.mode for name, variant in played.variants.items()}
    assert modes == {
        "the defaults, fixed": "off",
        "the defaults, tuned": "on",
        "a bad start, fixed": "off",
        "the same start, tuned": "on",
    }
    good, good_tuned, bad, bad_tuned = (played.scheduler(variant) for variant in played.variants.values())
    assert (good, bad) == (good_tuned, bad_tuned)
    assert good.backpressure.target_waiting < bad.backpressure.target_waiting


def _row(name: str, mode: str, reward: list[float | None]) -> Row:
    classes = {"default short": {"ttft_p50_s": 0.1, "ttft_p99_s": 0.5}}
    phases = [
        {phase: {"reward": each, "classes": classes} for phase in ("before", "after")} for each in reward
    ]
    made = row({"variant": name}, {"phases": phases})
    settings = {
        "minutes": 90,
        "phases": {"before": [0.25, 0.5], "after": [0.75, 1]},
        "scheduler": {"policy": "ewsjf"},
        "tuning": {"rollout": {"mode": mode}},
    }
    return replace(made, settings=settings)


def test_the_table_has_each_production_before_and_after_the_change() -> None:
    rows = [_row("fixed", "off", [0.1, 0.2, 0.3]), _row("tuned", "on", [0.4, None, 0.5])]
    headline = TABLES["headline"].written(rows)
    assert "| production | reward, minutes 22.5 to 45 | 67.5 to 90 |" in headline
    assert "| fixed | 0.200 ± 0.248 | 0.200 ± 0.248 | 0.10 / 0.50 ± 0.00 |" in headline
    assert "| tuned | 0.450 ± 0.635 | 0.450 ± 0.635 | 0.10 / 0.50 ± 0.00 |" in headline
