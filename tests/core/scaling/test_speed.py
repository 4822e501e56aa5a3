import pytest

from serve_app.core.scaling.pool_scaler import DecodeLine, EngineSpeed, PoolSpeed


def test_a_line_through_reports_gives_the_step_time_of_a_full_batch() -> None:
    line = DecodeLine()
    assert line.tpot_s(10) is None
    for sequences in (4, 8, 16, 32):
        line.observe(sequences, 0.02 + 0.001 * sequences)
    assert line.tpot_s(64) == pytest.approx(0.084)


def test_one_number_of_sequences_gives_no_slope() -> None:
    line = DecodeLine()
    for _ in range(5):
        line.observe(8, 0.03)
    assert line.tpot_s(64) == pytest.approx(0.03)


def test_more_sequences_never_make_a_step_shorter_nor_more_than_in_proportion() -> None:
    falling, steep = DecodeLine(), DecodeLine()
    for sequences, tpot_s in ((4, 0.05), (32, 0.02)):
        falling.observe(sequences, tpot_s)
    for sequences, tpot_s in ((4, 0.001), (8, 0.1)):
        steep.observe(sequences, tpot_s)
    assert falling.tpot_s(64) == pytest.approx(falling.tpot_s(1))
    assert steep.tpot_s(0) >= 0.0  # type: ignore[operator]


def test_a_speed_with_an_unknown_part_is_unknown() -> None:
    speed = PoolSpeed()
    assert speed.now(None) is None
    speed.slots = 16.0
    speed.observe(8, 0.03, prefill_ratio=0.0)
    assert speed.now(None) is None
    speed.set_prefill(0.0001)
    assert speed.now(None) == EngineSpeed(0.0001, 0.03 / 16)


def test_prefills_are_taken_out_of_a_reported_tpot() -> None:
    speed = PoolSpeed()
    speed.slots = 8.0
    speed.set_prefill(0.0001)
    speed.observe(8, 0.06, prefill_ratio=0.5)
    found = speed.now(None)
    assert found is not None
    assert found.output_token_s == pytest.approx(0.03 / 8)


def test_an_engine_that_may_not_fill_its_slots_is_slower() -> None:
    """With the limit at half of a full batch's TPOT, half of the slots stay empty."""
    speed = PoolSpeed()
    speed.slots = 101.0
    speed.set_prefill(0.0)
    for sequences in (1, 51, 101):
        speed.observe(sequences, 0.001 * sequences, prefill_ratio=0.0)
    full, limited = speed.now(None), speed.now(0.051)
    assert full is not None
    assert limited is not None
    assert full.output_token_s == pytest.approx(0.001)
    assert limited.output_token_s == pytest.approx(0.001, rel=1e-3)
    base = PoolSpeed()
    base.slots = 100.0
    base.set_prefill(0.0)
    for sequences in (1, 50, 100):
        base.observe(sequences, 0.05 + 0.0005 * sequences, prefill_ratio=0.0)
    slow = base.now(0.06)
    assert slow is not None
    assert slow.output_token_s == pytest.approx(0.06 / 20, rel=0.02)


def test_stated_figures_of_an_engine_count_once() -> None:
    speed = PoolSpeed()
    speed.slots = 10.0
    speed.set_prefill(0.001)
    for _ in range(100):
        speed.state(10, 0.05)
    for _ in range(50):
        speed.observe(10, 0.02, prefill_ratio=0.0)
    found = speed.now(None)
    assert found is not None
    assert found.output_token_s == pytest.approx(0.002, rel=0.1)
    assert found.seconds(1_000, 100) == pytest.approx(1.0 + 100 * found.output_token_s)
