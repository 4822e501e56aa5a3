from dataclasses import replace

import pytest

from experiments.adaptive_b_short.documents import DocumentMix
from experiments.adaptive_b_short.run import Run, play
from experiments.adaptive_b_short.settings import AdaptiveExperiment, Part, cells_of
from experiments.common.catalogue import Catalogue
from experiments.common.config import read_settings
from experiments.common.drifting_mix import MixRates
from experiments.common.experiment import Context


def experiment() -> AdaptiveExperiment:
    return read_settings(Catalogue().config("adaptive_b_short"), AdaptiveExperiment)


def small() -> AdaptiveExperiment:
    part = Part(fleet="8B on RTX 4090", scenarios=("few documents",), fixed_tokens=(4_096,))
    return replace(experiment(), parts=(part,), seeds=1, duration_s=20.0)


def test_an_adaptive_b_short_stands_beside_the_fixed_ones_in_every_scenario() -> None:
    played = experiment()
    cells = cells_of(played)
    assert len({tuple(cell.key.items()) for cell in cells}) == len(cells)
    for part in played.parts:
        for scenario in part.scenarios:
            mine = [
                cell
                for cell in cells
                if (cell.fleet, cell.scenario, cell.gated) == (part.fleet, scenario, part.gated)
            ]
            assert [cell.fixed_tokens for cell in mine] == [*part.fixed_tokens, None]


def test_only_the_adaptive_one_adapts_and_only_gated_ones_have_a_gate() -> None:
    rates = MixRates(low=0.05, high=0.5, low_s=0.1, high_s=0.2)
    for cell in cells_of(experiment()):
        scheduler = Run(experiment(), cell, rates, 0).scheduler
        assert scheduler.routing.adaptive_b_short.enabled is (cell.fixed_tokens is None)
        assert scheduler.backpressure.tpot_gate_s == (0.1 if cell.gated else None)
        assert scheduler.routing.b_short_tokens == (cell.fixed_tokens or 8_192)


def test_a_prompt_leaves_its_answer_a_place_in_the_context() -> None:
    drawn = DocumentMix(documents_mean=30_000).lengths([True] * 500, 0, 16_384)
    assert max(prompt + output for prompt, output in drawn) == 16_383


def test_all_values_meet_the_same_requests() -> None:
    rows = list(play(small(), Context(jobs=1)))
    assert [row.key["b_short"] for row in rows] == ["4,096", "adaptive"]
    fixed, adaptive = (row.figures for row in rows)
    assert fixed["requests"] == adaptive["requests"]
    assert fixed["moves"] == [0]
    assert fixed["last_b_short_tokens"] == [4_096]
    assert 0 < fixed["attainment"][0] <= 1


def test_rows_that_are_there_are_not_played_again() -> None:
    kept = tuple(cell.key for cell in cells_of(small()))
    assert list(play(small(), Context(jobs=1, kept=kept))) == []


def test_a_part_of_a_fleet_that_there_is_not_is_refused() -> None:
    with pytest.raises(ValueError, match="no fleet 'TPU': there are 70B on H100"):
        replace(experiment(), parts=(Part(fleet="TPU", scenarios=("flip",), fixed_tokens=(1,)),))
