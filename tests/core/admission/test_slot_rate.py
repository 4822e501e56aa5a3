"""Deadlines of requests that arrive before a drain rate was measured."""

from dataclasses import replace
from typing import Any

import pytest

from serve_app.core.admission.wait_prediction import SlotRate
from serve_app.core.events import ReplicaJoined, Retuned
from serve_app.core.routing.pools import RoutingSettings
from tests.builders import ManualDriver, concluded, retry_after_s, spec

SLOTS, BEYOND_BATCH, TPOT_S = 4, 3, 0.01
# The mean of the assumed lengths, cut at 60 tokens, is 54: a slot serves a request in about 0.5 s.
OUTPUT, EXPECTED_OUTPUT = 60, 54
PER_S = SLOTS / (EXPECTED_OUTPUT * TPOT_S)
TIMEOUT_S = 2.0
ADMITTED = SLOTS + BEYOND_BATCH + TIMEOUT_S * PER_S


def cold(*pools: str, spill: bool = True, **limits: Any) -> ManualDriver:
    """Idle replicas whose engines report their pace."""
    pools = pools or ("only",)
    driver = ManualDriver(routing=RoutingSettings(pools=pools, b_short_tokens=500, spill=spill))
    for pool in pools:
        usual = spec(f"{pool}-1", pool, max_num_seqs=SLOTS, max_model_len=4_000, kv_tokens=100_000)
        driver.feed(ReplicaJoined(replace(usual, **{"tpot_s": TPOT_S, **limits})))
        driver.report(f"{pool}-1")
    return driver


def burst(driver: ManualDriver, count: int, **fields: object) -> list[float]:
    """Return the `Retry-After` of each rejection among simultaneous requests."""
    delays_s = []
    for number in range(count):
        usual = {"max_output_tokens": OUTPUT, "prompt_tokens": 1, "expires_at": driver.now + TIMEOUT_S}
        commands = driver.arrive(f"b{number}", **{**usual, **fields})
        if ends := concluded(commands):
            assert ends == [(f"b{number}", "rejected_deadline_unmeetable")]
            delays_s.append(retry_after_s(commands))
    return delays_s


def test_requests_that_cannot_get_a_slot_before_their_deadline_are_rejected_at_once() -> None:
    assert 100 - len(burst(cold(), 100)) == pytest.approx(ADMITTED, abs=2)


def test_a_retuned_engine_queue_counts_as_slots() -> None:
    driver = cold()
    more = replace(driver.scheduler.settings.backpressure, target_waiting=BEYOND_BATCH + 20)
    driver.feed(Retuned(replace(driver.scheduler.settings, backpressure=more)))
    assert 100 - len(burst(driver, 100)) == pytest.approx(ADMITTED + 20, abs=2)


def test_each_retry_after_is_when_earlier_requests_have_ended() -> None:
    delays_s = burst(cold(), 100)
    # The retries follow one another at the pace of the slots.
    assert delays_s[-1] == pytest.approx(len(delays_s) / PER_S, rel=0.4)
    assert delays_s[0] < 1.0 < delays_s[len(delays_s) // 2] < delays_s[-1]


@pytest.mark.parametrize("count", [1, SLOTS, SLOTS + BEYOND_BATCH + int(TIMEOUT_S * PER_S) - 1])
def test_an_idle_fleet_rejects_nothing_that_it_can_serve(count: int) -> None:
    assert burst(cold(), count) == []


def test_requests_with_time_are_admitted() -> None:
    assert burst(cold(), 100, expires_at=60.0) == []


def test_nothing_is_rejected_where_the_pace_of_an_engine_is_unknown() -> None:
    assert burst(cold(tpot_s=None), 100) == []


def test_a_reported_pace_replaces_the_stated_one() -> None:
    driver = cold(tpot_s=None)
    driver.report("only-1", tpot_s=4 * TPOT_S, running=1)
    driver.report("only-1")
    expected = SLOTS + BEYOND_BATCH + TIMEOUT_S * PER_S / 4
    assert 100 - len(burst(driver, 100)) == pytest.approx(expected, abs=2)


def test_a_small_cache_has_fewer_slots() -> None:
    # The cache holds two requests of 3,000 tokens; prompts cost nothing here.
    driver = cold(kv_tokens=6_200)
    admitted = 100 - len(burst(driver, 100, prompt_tokens=3_000))
    assert admitted == pytest.approx(2 + BEYOND_BATCH + TIMEOUT_S * PER_S / 2, abs=2)


def test_prompts_limit_the_rate_where_they_take_longer_than_decoding() -> None:
    driver = cold(prefill_token_s=0.001)
    admitted = 100 - len(burst(driver, 100, prompt_tokens=1_000))
    assert admitted == pytest.approx(SLOTS + BEYOND_BATCH + TIMEOUT_S, abs=2)


def test_unknown_lengths_are_assumed_low() -> None:
    stated = 100 - len(burst(cold(), 100, max_output_tokens=1_000))
    # 0.4 of the assumed mean of 256 tokens.
    assert stated == pytest.approx(SLOTS + BEYOND_BATCH + TIMEOUT_S * SLOTS / (0.4 * 256 * TPOT_S), abs=2)


def test_requests_without_output_are_never_rejected_by_the_slots() -> None:
    assert burst(cold(), 100, max_output_tokens=0) == []


def test_work_for_another_pool_is_not_ahead() -> None:
    driver = cold("short", "long", spill=False)
    for number in range(40):
        driver.arrive(f"l{number}", prompt_tokens=2_000, max_output_tokens=OUTPUT)
    assert 60 - len(burst(driver, 60)) == pytest.approx(ADMITTED, abs=2)


def test_pools_that_share_their_work_drain_it_together() -> None:
    assert 100 - len(burst(cold("short", "long"), 100)) == pytest.approx(2 * ADMITTED - TIMEOUT_S, abs=4)


@pytest.mark.parametrize("timeout_s", [0.2, TIMEOUT_S, 4.0])
def test_the_quick_check_of_a_backlog_rejects_what_the_full_count_rejects(
    timeout_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    def admitted() -> list[bool]:
        driver, fields = cold("short", "long"), {"prompt_tokens": 1, "max_output_tokens": OUTPUT}
        return [not concluded(driver.arrive(f"w{n}", expires_at=timeout_s, **fields)) for n in range(150)]

    quick = admitted()
    assert set(quick) == {True, False}
    monkeypatch.setattr(SlotRate, "certainly_drains", lambda *_: False)
    assert admitted() == quick
