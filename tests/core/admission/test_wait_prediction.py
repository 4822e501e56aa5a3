"""Predicted waits, and the rates that they follow from."""

from dataclasses import replace
from typing import Any

import pytest

from serve_app.core.admission.wait_prediction import DrainRate, SlotRate, WaitPredictor, kind_of
from serve_app.core.events import ReplicaJoined, Retuned
from serve_app.core.request import ScheduledRequest
from serve_app.core.routing.pools import RoutingSettings
from tests.builders import ManualDriver, concluded, retry_after_s, scheduled_request, spec


def scheduled(prompt_tokens: int = 100) -> ScheduledRequest:
    return scheduled_request(prompt_tokens=prompt_tokens, max_output_tokens=0)


class Waits:
    """Waits of given lengths while the queue drains at 100 tokens per second."""

    def __init__(self) -> None:
        self.predictor = WaitPredictor(0.0)
        self.now = 0.0

    def play(self, count: int, *, ratio: float, prompt_tokens: int = 100) -> None:
        """Play requests with 10 s of work ahead each, that wait `ratio` times as long."""
        for _ in range(count):
            # Between requests the queue drains at its usual pace.
            for _ in range(4):
                self.now += 1.0
                self.predictor.drain.on_time(5, self.now)
                self.predictor.on_dispatch(scheduled(100), self.now)
            one = scheduled(prompt_tokens)
            ahead = round(10 * self.predictor.drain.tokens_per_s)
            one.prediction = self.predictor.predict(one, ahead, self.now - 10.0 * ratio)
            if one.prediction is not None:
                self.predictor.drain.on_time(0, self.now)
                self.predictor.on_dispatch(one, self.now)


def test_a_wait_is_unknown_before_the_queue_has_drained() -> None:
    predictor = WaitPredictor(0.0)
    assert predictor.predict(scheduled(), 1_000, 0.0) is None
    assert predictor.seconds_per_token(kind_of(scheduled()), 1_000) is None


def test_the_correction_of_a_kind_is_its_ratio_of_actual_to_predicted_waits() -> None:
    waits = Waits()
    waits.play(60, ratio=0.1, prompt_tokens=50)
    waits.play(60, ratio=1.5, prompt_tokens=900)
    ratios = {}
    for prompt_tokens in (50, 900):
        prediction = waits.predictor.predict(scheduled(prompt_tokens), 1_000, waits.now)
        assert prediction is not None
        ratios[prompt_tokens] = prediction.wait_s / prediction.uncorrected_s
    assert ratios[50] == pytest.approx(0.1, abs=0.05)
    assert ratios[900] == pytest.approx(1.5, abs=0.1)


def test_one_very_long_wait_does_not_distort_the_correction() -> None:
    waits = Waits()
    waits.play(30, ratio=1.0)
    waits.play(1, ratio=1_000.0)
    prediction = waits.predictor.predict(scheduled(), 1_000, waits.now)
    assert prediction is not None
    assert prediction.wait_s < 1.5 * prediction.uncorrected_s


def test_an_expired_request_raises_the_correction() -> None:
    waits = Waits()
    waits.play(30, ratio=1.0)
    before = waits.predictor.seconds_per_token(kind_of(scheduled()), 1_000)
    one = scheduled()
    one.prediction = waits.predictor.predict(one, 1_000, waits.now)
    waits.predictor.on_expiry(one, waits.now + 8.0)
    after = waits.predictor.seconds_per_token(kind_of(scheduled()), 1_000)
    assert before is not None
    assert after is not None
    assert after > before


def ratio(predictor: WaitPredictor, tokens_ahead: int, now: float) -> float:
    """Return predicted over uncorrected wait of a new request."""
    prediction = predictor.predict(scheduled(), tokens_ahead, now)
    assert prediction is not None
    return prediction.wait_s / prediction.uncorrected_s


def test_an_overdue_request_raises_the_correction_while_it_waits() -> None:
    waits = Waits()
    waits.play(30, ratio=1.0)
    predictor, before = waits.predictor, ratio(waits.predictor, 1_000, waits.now)
    one = scheduled()
    one.queued, one.prediction = True, predictor.predict(one, 1_000, waits.now)
    assert one.prediction is not None
    predictor.on_enqueue(one)
    predictor.on_time(1, waits.now + one.prediction.wait_s - 0.1)
    assert ratio(predictor, 1_000, waits.now) == pytest.approx(before)
    overdue = []
    for late_s in (1.0, 20.0, 40.0):
        predictor.on_time(1, waits.now + one.prediction.wait_s + late_s)
        overdue.append(ratio(predictor, 1_000, waits.now))
    assert before < overdue[0] < overdue[1] < overdue[2]
    # It says little about a request with much more work ahead, which nothing has overtaken yet.
    assert ratio(predictor, 100_000, waits.now) == pytest.approx(before)
    # Once it leaves the queue, only its end counts.
    predictor.on_dequeue(one)
    assert ratio(predictor, 1_000, waits.now) == pytest.approx(before)


def test_errors_have_a_sign_and_a_size() -> None:
    waits = Waits()
    waits.play(3, ratio=1.0)
    errors = waits.predictor.errors
    count = errors.count
    one = scheduled()
    one.prediction = waits.predictor.predict(one, 100, waits.now)
    assert one.prediction is not None
    waits.predictor.on_dispatch(one, waits.now + one.prediction.wait_s + 4.0)
    assert errors.count == count + 1
    assert errors.mean_s < 0 < errors.mean_absolute_s


def test_trust_needs_observations_and_lapses_without_new_ones() -> None:
    waits = Waits()
    predictor, kind = waits.predictor, kind_of(scheduled())
    waits.play(19, ratio=1.0)
    assert not predictor.is_trusted(kind, waits.now)
    waits.play(1, ratio=1.0)
    assert predictor.is_trusted(kind, waits.now)
    assert predictor.is_trusted(kind, waits.now + 9.9)
    assert not predictor.is_trusted(kind, waits.now + 10.1), "one is admitted as a probe"
    assert predictor.is_trusted(kind, waits.now + 10.2)


def test_a_kind_without_recent_observations_is_probed() -> None:
    waits = Waits()
    waits.play(30, ratio=1.0)
    unseen = kind_of(scheduled(4_000))
    trusted = [waits.predictor.is_trusted(unseen, waits.now + second) for second in (0.0, 1.0, 2.5, 3.0)]
    assert trusted == [False, True, False, True]


# -- drain rate -------------------------------------------------------------------------------------------


def backlog(rate: DrainRate, begin: float, seconds: int, tokens_per_s: int) -> float:
    """Record one dispatch per second during a backlog; return its end."""
    rate.on_time(0, begin)
    for second in range(1, seconds + 1):
        rate.on_time(3, begin + second)
        rate.on_dispatch(tokens_per_s)
    return begin + seconds


def test_dispatches_without_a_backlog_do_not_count() -> None:
    rate = DrainRate(0.0)
    rate.on_time(0, 10.0)
    rate.on_dispatch(500)
    assert rate.tokens_per_s == 0.0


def test_an_idle_fleet_does_not_count_as_slow() -> None:
    rate = DrainRate(0.0)
    now = backlog(rate, 0.0, 60, 700)
    before = rate.tokens_per_s
    for hour in range(1, 5):
        rate.on_time(0, now + 3_600 * hour)
        rate.on_dispatch(10)
    assert rate.tokens_per_s == before


def test_a_fleet_that_dispatches_nothing_during_a_backlog_becomes_slow() -> None:
    rate = DrainRate(0.0)
    now = backlog(rate, 0.0, 60, 700)
    rate.on_time(3, now + 90.0)
    assert 0 < rate.tokens_per_s < 70


# -- deadlines of requests that arrive before a drain rate was measured -----------------------------------

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


@pytest.mark.parametrize(
    ("replica", "fields", "admitted"),
    [
        ({}, {}, ADMITTED),
        ({}, {"expires_at": 60.0}, 100),
        # The lower the pace, the fewer; an unknown one rejects nothing.
        ({"tpot_s": 4 * TPOT_S}, {}, SLOTS + BEYOND_BATCH + TIMEOUT_S * PER_S / 4),
        ({"tpot_s": None}, {}, 100),
        # The cache holds two requests of 3,000 tokens; prompts cost nothing here.
        ({"kv_tokens": 6_200}, {"prompt_tokens": 3_000}, 2 + BEYOND_BATCH + TIMEOUT_S * PER_S / 2),
        # Prompts limit the rate where they take longer than decoding.
        ({"prefill_token_s": 0.001}, {"prompt_tokens": 1_000}, SLOTS + BEYOND_BATCH + TIMEOUT_S),
        # Unknown lengths are assumed low: 0.4 of the assumed mean of 256 tokens.
        ({}, {"max_output_tokens": 1_000}, SLOTS + BEYOND_BATCH + TIMEOUT_S * SLOTS / (0.4 * 256 * TPOT_S)),
        ({}, {"max_output_tokens": 0}, 100),
    ],
)
def test_requests_that_cannot_get_a_slot_before_their_deadline_are_rejected_at_once(
    replica: dict[str, Any], fields: dict[str, Any], admitted: float
) -> None:
    assert 100 - len(burst(cold(**replica), 100, **fields)) == pytest.approx(admitted, abs=2)


def test_a_retuned_engine_queue_counts_as_slots() -> None:
    driver = cold()
    more = replace(driver.scheduler.settings.backpressure, target_waiting=BEYOND_BATCH + 20)
    driver.feed(Retuned(replace(driver.scheduler.settings, backpressure=more)))
    assert 100 - len(burst(driver, 100)) == pytest.approx(ADMITTED + 20, abs=2)


def test_a_reported_pace_replaces_the_stated_one() -> None:
    driver = cold()
    driver.report("only-1", tpot_s=4 * TPOT_S, running=1)
    driver.report("only-1")
    expected = SLOTS + BEYOND_BATCH + TIMEOUT_S * PER_S / 4
    assert 100 - len(burst(driver, 100)) == pytest.approx(expected, abs=2)


def test_an_idle_fleet_rejects_nothing_that_it_can_serve() -> None:
    assert burst(cold(), int(ADMITTED) - 1) == []


def test_each_retry_after_is_when_earlier_requests_have_ended() -> None:
    delays_s = burst(cold(), 100)
    # The retries follow one another at the pace of the slots.
    assert delays_s[-1] == pytest.approx(len(delays_s) / PER_S, rel=0.4)
    assert delays_s[0] < 1.0 < delays_s[len(delays_s) // 2] < delays_s[-1]


def test_only_work_that_a_pool_may_serve_is_ahead() -> None:
    driver = cold("short", "long", spill=False)
    for number in range(40):
        driver.arrive(f"l{number}", prompt_tokens=2_000, max_output_tokens=OUTPUT)
    assert 60 - len(burst(driver, 60)) == pytest.approx(ADMITTED, abs=2)
    # Pools that share their work drain it together.
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
