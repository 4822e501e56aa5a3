"""Time per output token, measured on streamed answers."""

from serve_app.core.routing.observed import MeasuredPace


def test_it_is_the_median_of_recently_ended_answers() -> None:
    pace = MeasuredPace()
    for number, tpot_s in enumerate((0.05, 0.07)):
        pace.record(tpot_s, float(number))
    assert pace.tpot_s(1.0) is None
    # A slow client delays only its own stream.
    pace.record(9.0, 2.0)
    assert pace.tpot_s(2.0) == 0.07
    pace.record(0.06, 3.0)
    assert pace.tpot_s(3.0) == 0.065


def test_an_old_pace_expires() -> None:
    pace = MeasuredPace()
    for at in (0.0, 1.0, 2.0, 3.0):
        pace.record(0.2, at)
    assert pace.tpot_s(10.5) == 0.2
    assert pace.tpot_s(11.5) is None
