"""Programs on a replica that reports neither its load nor the size of its KV cache."""

from dataclasses import replace

import pytest

from serve_app.core.programs import capacity
from serve_app.core.programs.capacity import LearnedCapacity
from tests.experiments.agents import fleet, generated, play

KV_TOKENS = 300_000


def prefill_tokens(seed: int, *, reports_load: bool) -> int:
    one = fleet(KV_TOKENS, replicas=1, profile="llama3-70b-h100-tp4")
    programs = generated(12, seed, turns=30)
    return play(programs, fleet=replace(one, reports_load=reports_load), concurrency=10).prefill_tokens


# Programs for which the assumed capacity would matter most.
@pytest.mark.parametrize(("assumed", "seed"), [(KV_TOKENS // 4, 4), (KV_TOKENS * 5, 2)])
def test_a_capacity_that_is_learned_is_nearly_as_good_as_a_reported_one(
    assumed: int, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(capacity, "LIKELY_KV_TOKENS", assumed)
    reported, learned = (prefill_tokens(seed, reports_load=reports) for reports in (True, False))
    monkeypatch.setattr(LearnedCapacity, "on_hit", lambda *_: None)
    monkeypatch.setattr(LearnedCapacity, "on_miss", lambda *_: None)
    wrong = prefill_tokens(seed, reports_load=False)
    assert learned < 1.3 * reported
    assert learned < 0.7 * wrong
