from dataclasses import replace

from experiments.common.catalogue import Catalogue
from experiments.common.config import read_settings
from experiments.common.rows import Row
from experiments.tuned_drift.settings import DriftExperiment, mixed_lengths
from experiments.tuned_drift.tables import TABLES
from tests.experiments.builders import row


def experiment() -> DriftExperiment:
    return read_settings(Catalogue().config("tuned_drift"), DriftExperiment)


def test_lengths_are_of_the_papers_mix_by_kind() -> None:
    kinds = [False, True] * 200
    drawn = list(mixed_lengths(kinds, 3))
    for (prompt, output), is_long in zip(drawn, kinds, strict=True):
        assert (1_024 <= prompt <= 4_096) if is_long else (32 <= prompt <= 256)
        assert 1 <= output <= 512
    assert drawn == list(mixed_lengths(kinds, 3))
    assert drawn != list(mixed_lengths(kinds, 4))


def test_only_the_tuned_variant_tries_anything_and_it_begins_where_the_fixed_one_does() -> None:
    played = experiment()
    modes = {name: played.tuner(variant).rollout.mode for name, variant in played.variants.items()}
    assert modes == {
        "the defaults, fixed": "off",
        "a bad start, fixed": "off",
        "the same start, tuned": "on",
    }
    good, bad, tuned = (played.scheduler(variant) for variant in played.variants.values())
    assert bad == tuned
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


def test_the_tables_compare_a_tuned_production_with_the_fixed_one_of_the_same_start() -> None:
    rows = [_row("fixed", "off", [0.1, 0.2, 0.3]), _row("tuned", "on", [0.4, 0.6, 0.5])]
    assert "| after | tuned | 0.10 / 0.50 ± 0.00 | 0.500 ± 0.248 | +0.300 ± 0.248 |" in TABLES[
        "phases"
    ].written(rows)
    headline = TABLES["headline"].written(rows)
    assert "| production | reward, minutes 22.5 to 45 | 67.5 to 90 |" in headline
    unmeasured = [rows[0], _row("tuned", "on", [0.4, None, 0.5])]
    assert "| after | tuned | 0.10 / 0.50 ± 0.00 | 0.450 ± 0.635 |  |" in TABLES["phases"].written(unmeasured)
