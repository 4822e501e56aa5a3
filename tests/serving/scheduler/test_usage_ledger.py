"""Usage ledger: counts, retention, and persistence across restarts."""

from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry, generate_latest

from serve_app.errors import Outcome
from serve_app.request import Usage
from serve_app.serving.scheduler.usage import PersistentUsage, UsageLedger
from tests.builders import key
from tests.serving.channel.harness import (
    FAST,
    ControlPlane,
    granted,
    rejected,
    scheduler_settings,
    wait_until,
)

DAY_S = 86_400.0


Ended = tuple[str, str, Usage | None]


def ended(key_id: str = "k1", model: str = "m", prompt: int = 10, output: int = 5, cached: int = 2) -> Ended:
    return key_id, model, Usage(prompt_tokens=prompt, output_tokens=output, cached_tokens=cached)


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def test_it_adds_up_by_key_model_and_day() -> None:
    clock, registry = Clock(), CollectorRegistry()
    ledger = UsageLedger("m", registry, clock)
    for each in (
        ended(),
        ended(),
        ended("k2"),
        ended(model="alias"),
        ("k1", "m", None),
    ):
        ledger.add(*each)
    clock.now = DAY_S
    ledger.add(*ended())
    first = {"day": "1970-01-01", "key": "k1", "model": "m", "requests": 3, "prompt_tokens": 20}
    assert ledger.rows()[0] == {**first, "cached_tokens": 4, "generated_tokens": 10}
    assert [(row["day"], row["key"], row["model"]) for row in ledger.rows()] == [
        ("1970-01-01", "k1", "m"),
        ("1970-01-01", "k1", "alias"),
        ("1970-01-01", "k2", "m"),
        ("1970-01-02", "k1", "m"),
    ]
    assert (
        'ewsjf_key_tokens_total{key="k1",kind="prompt",model="m"} 40.0' in generate_latest(registry).decode()
    )


def test_what_keys_have_spent_is_that_of_the_current_day_and_month() -> None:
    clock = Clock()
    ledger = UsageLedger("m", CollectorRegistry(), clock)
    # The last day of January, and the first two of February.
    for day in (30, 31, 32):
        clock.now = day * DAY_S
        for each in (ended(), ended(model="alias"), ended("k2")):
            ledger.add(*each)
    ledger.add(*ended())
    once, twice, thrice = (1, 10, 2, 5), (2, 20, 4, 10), (3, 30, 6, 15)
    assert ledger.spent(["k1", "unknown"]) == {
        "k1": {"day": {"m": twice, "alias": once}, "month": {"m": thrice, "alias": twice}}
    }


def test_a_state_that_was_taken_does_not_change_and_can_be_added_to_another_ledger() -> None:
    ledger = UsageLedger("m", CollectorRegistry(), Clock())
    ledger.add(*ended())
    state = ledger.state()
    ledger.add(*ended())
    other = UsageLedger("m", CollectorRegistry(), Clock())
    other.add(*ended())
    other.add_stored(state)
    assert other.rows()[0]["requests"] == 2
    assert state["days"]["1970-01-01"]["k1"]["m"] == (1, 10, 2, 5)


@pytest.mark.parametrize(
    ("figures", "reason"),
    [
        ([1, 2, 3], "Expected `array` of length 4, got 3"),
        ([1, 2, 3, -1], "Expected `int` >= 0"),
        ([1, 2, 3, "4"], "Expected `int`, got `str`"),
    ],
)
def test_a_state_that_makes_no_sense_is_rejected_as_a_whole(figures: list[object], reason: str) -> None:
    ledger = UsageLedger("m", CollectorRegistry(), Clock())
    good = [1, 1, 1, 1]
    with pytest.raises(ValueError, match=rf"{reason} - at `\$\.days"):
        ledger.add_stored({"days": {"1970-01-01": {"a": {"m": good}, "b": {"m": figures}}}})
    assert ledger.rows() == []


def test_old_days_and_further_keys_are_bounded() -> None:
    clock, registry = Clock(), CollectorRegistry()
    ledger = UsageLedger("m", registry, clock)
    for day in range(100):
        clock.now = day * DAY_S
        ledger.add(*ended())
    assert len(ledger.rows()) == 92
    for number in range(1_100):
        ledger.add(*ended(f"k{number}"))
    page = generate_latest(registry).decode()
    assert 'key="other"' in page
    assert page.count("ewsjf_key_requests_total{") == 1_001


def test_a_clock_that_is_set_back_changes_no_day_that_is_over() -> None:
    clock = Clock()
    clock.now = DAY_S
    ledger = UsageLedger("m", CollectorRegistry(), clock)
    ledger.add(*ended())
    clock.now = 0.0
    ledger.add(*ended())
    assert [(row["day"], row["requests"]) for row in ledger.rows()] == [("1970-01-02", 2)]


def test_a_clock_that_was_a_year_ahead_and_is_right_again_counts_on_the_right_day() -> None:
    clock = Clock()
    ledger = UsageLedger("m", CollectorRegistry(), clock)
    ledger.add(*ended())
    clock.now = 365 * DAY_S
    ledger.add(*ended())
    handed_out = ledger.state()
    clock.now = DAY_S / 2
    ledger.add(*ended())
    clock.now = 5 * DAY_S
    ledger.add(*ended())
    days = [("1970-01-01", 2), ("1970-01-06", 1), ("1971-01-01", 1)]
    assert [(row["day"], row["requests"]) for row in ledger.rows()] == days
    assert handed_out["days"]["1970-01-01"]["k1"]["m"] == (1, 10, 2, 5), "what was handed out stays"


def test_a_clock_that_begins_in_the_past_loses_nothing_of_a_full_ledger() -> None:
    clock = Clock()
    ledger = UsageLedger("m", CollectorRegistry(), clock)
    for day in range(1_000, 1_092):
        clock.now = day * DAY_S
        ledger.add(*ended())
    clock.now = 0.0
    ledger.add(*ended())
    ledger.add(*ended())
    assert ledger.rows()[0]["day"] == "1970-01-01"
    assert ledger.rows()[0]["requests"] == 2


def persistent(folder: Path, interval_s: float = 60.0) -> PersistentUsage:
    return PersistentUsage("m", str(folder), "app/m", interval_s, CollectorRegistry())


async def test_it_survives_a_restart(tmp_path: Path) -> None:
    first = persistent(tmp_path)
    await first.load()
    first.ledger.add(*ended())
    await first.close()
    second = persistent(tmp_path)
    await second.load()
    second.ledger.add(*ended())
    assert second.shown()["rows"][0]["requests"] == 2
    await second.close()


async def test_stored_usage_survives_a_start_that_cannot_read_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = persistent(tmp_path)
    await first.load()
    first.ledger.add(*ended())
    await first.close()

    def unreachable(_: object) -> None:
        raise OSError("the network is down")

    with monkeypatch.context() as broken:
        broken.setattr("serve_app.serving.state.StateStore._read", unreachable)
        second = persistent(tmp_path, 0.01)
        await second.load()
        second.ledger.add(*ended())
        await second.save()
    await wait_until(lambda: second.ledger.rows()[0]["requests"] == 2, "what was stored is added")
    await second.close()
    third = persistent(tmp_path)
    await third.load()
    assert third.ledger.rows()[0]["requests"] == 2
    await third.close()


async def test_a_scheduler_counts_only_requests_that_ended_in_an_engine() -> None:
    ledger = UsageLedger("m", CollectorRegistry())
    control_plane = ControlPlane(scheduler_settings(), FAST)
    await control_plane.begin(usage_ledger=ledger)
    gateway = await control_plane.gateway()
    await control_plane.replica()
    usage = Usage(prompt_tokens=30, output_tokens=7, cached_tokens=16)
    await granted(gateway, "r1", key=key("k1"))
    gateway.end("r1", Outcome.COMPLETED, usage)
    await granted(gateway, "r2", key=key("k1"))
    gateway.end("r2", Outcome.CANCELLED)
    await granted(gateway, "r3")
    gateway.end("r3", Outcome.COMPLETED, usage)
    await rejected(gateway, "r4", model="unknown", key=key("k2"))
    await wait_until(lambda: len(control_plane.live.core) == 0, "all have ended")
    (row,) = ledger.rows()
    assert (row["key"], row["requests"]) == ("k1", 2)
    # A cancelled answer counts with its estimate.
    assert row["prompt_tokens"] > 30
    assert row["cached_tokens"] == 16
    assert row["generated_tokens"] > 7
    await control_plane.close()
