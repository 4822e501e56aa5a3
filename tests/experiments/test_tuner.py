from dataclasses import replace

import pytest

from experiments.common.catalogue import Catalogue
from experiments.common.config import read_settings
from experiments.common.tuning_starts import BAD_START, DEFAULTS, begun_from
from experiments.tuner.run import SearchPair, TunerExperiment, searched
from serve_app.lab.simulation.run import FleetSettings, scheduler_settings


def experiment() -> TunerExperiment:
    return read_settings(Catalogue().config("tuner"), TunerExperiment, quick=True)


def test_the_bad_start_differs_from_the_defaults_in_every_value() -> None:
    settings = scheduler_settings("ewsjf", FleetSettings(profile="laptop").routing, {})
    good, bad = (begun_from(settings, start) for start in (DEFAULTS, BAD_START))
    assert bad.scheduler.backpressure.target_waiting == 16
    assert bad.scheduler.isolation.max_long_prefills == 8
    assert good.scheduler.isolation != bad.scheduler.isolation
    assert good.scheduler.ewsjf.weights != bad.scheduler.ewsjf.weights


@pytest.mark.slow
def test_both_searches_stay_within_their_seconds_and_repeat_themselves() -> None:
    small = experiment()
    pair = SearchPair(small, "paper-mix", "bad", 5.0, 0)
    first, again = (searched(pair) for _ in range(2))
    assert first == again
    assert first["tpe"].candidates >= first["presets"].candidates
    for figures in first.values():
        assert 0 < figures.requests <= small.search_s * small.pace_requests_per_s * 1.3
        assert figures.applied_gain in (0.0, figures.best_gain)


def test_a_start_of_a_mix_that_does_not_exist_is_rejected() -> None:
    with pytest.raises(ValueError, match="no mix chats: there are paper-mix, bursts"):
        replace(experiment(), starts={"chats": ("good",)})
