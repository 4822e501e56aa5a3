"""Programs on a replica that reports neither its load nor the size of its KV cache."""

from dataclasses import replace

import pytest

from serve_app.core.programs import residency
from serve_app.core.programs.residency import LearnedCapacity
from tests.experiments.agents import fleet, generated, play

KV_TOKENS = 400_000
PROGRAMS = generated(20, 2, turns=40)


def prefill_tokens(*, reports_load: bool) -> int:
    one = fleet(KV_TOKENS, replicas=1, profile="llama3-70b-h100-tp4")
    return play(PROGRAMS, fleet=replace(one, reports_load=reports_load), concurrency=12).prefill_tokens


@pytest.mark.application
@pytest.mark.parametrize("assumed", [100_000, 2_000_000])
def test_a_capacity_that_is_learned_is_nearly_as_good_as_a_reported_one(
    assumed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(residency, "LIKELY_KV_TOKENS", assumed)
    reported, learned = (prefill_tokens(reports_load=reports) for reports in (True, False))
    monkeypatch.setattr(LearnedCapacity, "on_hit", lambda *_: None)
    monkeypatch.setattr(LearnedCapacity, "on_miss", lambda *_: None)
    wrong = prefill_tokens(reports_load=False)
    assert learned < 1.3 * reported
    assert learned < 0.8 * wrong
