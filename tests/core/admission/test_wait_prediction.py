import pytest

from serve_app.core.admission.wait_prediction import WaitPredictor, kind_of
from serve_app.core.request import ScheduledRequest
from tests.builders import scheduled_request


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
