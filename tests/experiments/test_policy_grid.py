from pathlib import Path

import pytest

from experiments.policies.grid import (
    Case,
    Experiment,
    Variant,
    load_experiment,
    only,
    planned,
    without_unknown_policies,
)
from serve_app.errors import SettingsError
from serve_app.simulation.fleet import EngineChanges

FOLDER = Path(__file__).resolve().parents[2] / "configs" / "experiments"

SMALL = Experiment(
    profiles=("laptop",),
    replicas=1,
    seeds=2,
    requests=100,
    variants={
        "fcfs": Variant(),
        "chunked": Variant(policy="fcfs", engine=EngineChanges(long_prefill_token_threshold=64)),
    },
    cases=(
        Case(trace="paper-mix", loads=(0.5, 1.0)),
        Case(name="noisy", trace="lmsys", loads=(0.9,), length_noise=0.3),
    ),
)


@pytest.mark.parametrize("name", ["policies", "robustness"])
def test_the_experiments_that_come_with_the_project_can_be_read(name: str) -> None:
    experiment = load_experiment(FOLDER / f"{name}.yaml")
    assert experiment.seeds >= 5
    assert "fcfs" in experiment.variants


def test_every_variant_meets_every_load_with_every_seed_at_one_rate() -> None:
    runs = list(planned(SMALL, jobs=1))
    assert len(runs) == 2 * 2 * 2 + 2 * 2
    rates: dict[tuple[str, float, int], set[float | None]] = {}
    for place, run in runs:
        assert run.seed == place.seed
        assert run.name == place.policy
        assert run.noise.relative_error == (0.3 if place.case == "noisy" else 0.0)
        rates.setdefault((place.case, place.load, place.seed), set()).add(run.rate_per_s)
    assert all(len(one) == 1 for one in rates.values())
    (half,), (full,) = rates["paper-mix", 0.5, 0], rates["paper-mix", 1.0, 0]
    assert half is not None
    assert full == pytest.approx(2 * half)


def test_policies_that_are_not_there_are_left_out_by_name() -> None:
    wanted = Experiment(
        profiles=SMALL.profiles,
        cases=SMALL.cases,
        variants={"fcfs": Variant(), "best": Variant(policy="lifo")},
    )
    there, missing = without_unknown_policies(wanted)
    assert list(there.variants) == ["fcfs"]
    assert missing == ["best"]


def test_a_part_can_be_chosen_by_name() -> None:
    part = only(SMALL, variants=["chunked"], cases=["noisy"])
    assert list(part.variants) == ["chunked"]
    assert [case.name for case in part.cases] == ["noisy"]
    with pytest.raises(SettingsError, match="the experiment has no 'quiet': it has paper-mix, noisy"):
        only(SMALL, cases=["quiet"])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("profiles: [laptop]\nvariants: {fcfs: {}}\ncases: [{trace: paper-mix, load: [1]}]", "load"),
        ("profiles: [laptop]\nvariants: {fcfs: {engine: {chunk: 3}}}\ncases: []", "chunk"),
        ("profiles: []\nvariants: {}\ncases: []", "at least one"),
        ("{", "is not an experiment"),
    ],
)
def test_a_file_that_is_no_experiment_is_refused_by_name(text: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "experiment.yaml"
    path.write_text(text)
    with pytest.raises(SettingsError, match=message):
        load_experiment(path)
