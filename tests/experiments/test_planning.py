from pathlib import Path

import pytest

from experiments.planning.plans import MixGrid, write_mix
from serve_app.lab.workloads import TraceChoice, resolve

GRID = MixGrid(
    profile="laptop",
    rate_per_s=10.0,
    requests=2_000,
    long_ratios=(0.1, 0.4),
    short=((300, 150),),
    long=((3_000, 150), (8_000, 400)),
)


def test_a_mix_is_written_with_its_shares_and_means(tmp_path: Path) -> None:
    for mix in GRID.mixes():
        path = tmp_path / "mix.csv"
        write_mix(path, mix, GRID.case(mix))
        requests = resolve(TraceChoice(name=str(path)), 0).requests
        long = [one for one in requests if one.prompt_tokens + one.output_tokens > mix.b_short_tokens]
        assert len(requests) == GRID.requests
        assert len(long) / len(requests) == pytest.approx(mix.long_ratio, abs=0.03)
        mean = sum(one.prompt_tokens for one in long) / len(long)
        assert mean == pytest.approx(mix.long[0], rel=0.03)


def test_the_grid_plans_every_combination_under_a_name_of_its_own() -> None:
    cases = [GRID.case(mix) for mix in GRID.mixes()]
    assert len({case.name for case in cases}) == len(cases) == 4
    assert cases[0].title == "300 + 150 and 3,000 + 150, 10% long"
    assert cases[0].b_short_tokens == ((450 + 3_150) // 2,)
