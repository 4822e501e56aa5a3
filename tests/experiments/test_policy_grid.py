from pathlib import Path

import pytest

from experiments.common.config import read_settings
from experiments.policies.disturbances import LengthNoise
from experiments.policies.grid import PolicyCase, PolicyGrid, PolicyVariant, cells_of, planned
from serve_app.errors import SettingsError
from serve_app.lab.simulation.run import EngineChanges

SMALL = PolicyGrid(
    profiles=("laptop",),
    replicas=1,
    seeds=2,
    requests=100,
    variants={
        "fcfs": PolicyVariant(),
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
    assert sum(map(len, plan)) == 2 * 2 * 2 + 2 * 2
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
