import cProfile
import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from serve_app.core.events import Cancelled, Finished, FirstToken
from serve_app.core.latency_targets import LatencyTargetSettings, MissChance, TargetLimits, _WorkByTime
from serve_app.errors import Outcome
from serve_app.request import KeyTerms, LatencyTarget, PriorityClass, Usage
from tests.builders import (
    ManualDriver,
    concluded,
    dispatched,
    fill,
    one_replica,
    only_conclusion,
    retry_after_s,
)
from tests.core.dispatch.test_dispatcher import make_driver, served_one_by_one


def within(ttft_s: float | None = None, **fields: Any) -> LatencyTarget:
    return LatencyTarget(ttft_s=ttft_s, **fields)


def later(driver: ManualDriver, seconds: float) -> None:
    """Let time pass, with a report of the replica."""
    driver.report("r1", after_s=seconds)


# Order.


def test_a_request_precedes_others_once_half_of_its_limit_has_passed() -> None:
    driver = make_driver()
    fill(driver)
    driver.arrive("before")
    driver.arrive("with target", target=within(4.0))
    later(driver, 2.5)
    assert served_one_by_one(driver, ["f0", "f1", "f2"]) == ["with target", "before"]


def test_a_request_with_much_time_left_has_its_usual_place() -> None:
    driver = make_driver()
    fill(driver)
    driver.arrive("before")
    driver.arrive("with target", target=within(4.0))
    later(driver, 1.0)
    assert served_one_by_one(driver, ["f0", "f1", "f2"]) == ["before", "with target"]


def test_of_two_urgent_requests_the_one_that_must_be_dispatched_first_is_first() -> None:
    driver = make_driver()
    fill(driver)
    driver.arrive("later", target=within(3.0))
    driver.arrive("sooner", target=within(2.5))
    later(driver, 2.0)
    assert served_one_by_one(driver, ["f0", "f1", "f2"]) == ["sooner", "later"]


def test_a_request_that_can_no_longer_meet_its_target_has_its_usual_place_again() -> None:
    driver = make_driver()
    fill(driver)
    driver.arrive("before")
    driver.arrive("with target", target=within(2.0))
    later(driver, 2.5)
    assert served_one_by_one(driver, ["f0", "f1", "f2"]) == ["before", "with target"]


def test_a_late_request_does_not_hold_back_those_behind_it() -> None:
    driver = make_driver()
    fill(driver)
    driver.arrive("before")
    driver.arrive("late", target=within(2.0))
    driver.arrive("urgent", target=within(5.0))
    later(driver, 3.0)
    assert served_one_by_one(driver, ["f0", "f1", "f2"]) == ["urgent", "before", "late"]


def test_a_target_does_not_pass_requests_of_a_higher_class() -> None:
    driver = make_driver()
    fill(driver)
    driver.arrive("with target", target=within(2.0))
    driver.arrive("interactive", priority=PriorityClass.INTERACTIVE)
    later(driver, 1.5)
    assert served_one_by_one(driver, ["f0", "f1", "f2"])[0] == "interactive"


# Where targets come from.


def test_a_request_lacks_no_limit_that_its_key_or_its_class_has() -> None:
    of_class = TargetLimits(ttft_s=9.0, tpot_s=0.1, refuse=True)
    driver = ManualDriver(latency_targets=LatencyTargetSettings(default=of_class))
    driver.join()
    key = KeyTerms(key_id="k", target=within(5.0))
    for name, given_fields, expected in (
        ("own", {"target": within(2.0), "key": key}, within(2.0, tpot_s=0.1, refuse=True)),
        ("key", {"key": key}, within(5.0, tpot_s=0.1, refuse=True)),
        ("class", {}, within(9.0, tpot_s=0.1, refuse=True)),
    ):
        driver.arrive(name, **given_fields)
        target = driver.find(name).target
        assert target is not None
        assert target.limits == expected
    driver.arrive("other class", priority=PriorityClass.INTERACTIVE)
    assert driver.find("other class").target is None


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"ttft_s": 0.0}, "ttft_s must be a positive number"),
        ({"tpot_s": 90_000.0}, "tpot_s must be at most 86400"),
        ({"refuse": True}, "refuse needs a limit"),
    ],
)
def test_a_target_out_of_range_is_an_error(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        TargetLimits(**fields)


# Placement.


def two_replicas() -> ManualDriver:
    """Return two replicas; `busy` has a prefill of many seconds, but more free KV cache."""
    driver = one_replica("busy", limits={"kv_tokens": 500_000, "max_model_len": 100_000})
    driver.join("idle", "only", kv_tokens=200_000, max_model_len=100_000)
    driver.arrive("long", prompt_tokens=30_000)
    assert driver.find("long").replica_id == "busy"
    return driver


def test_a_request_goes_to_a_replica_on_which_its_target_is_met() -> None:
    driver = two_replicas()
    assert dispatched(driver.arrive("patient")) == [("patient", "busy")]
    assert dispatched(driver.arrive("hasty", target=within(1.0))) == [("hasty", "idle")]


def test_a_target_that_no_replica_meets_does_not_change_the_replica() -> None:
    driver = two_replicas()
    assert dispatched(driver.arrive("impossible", target=within(0.001))) == [("impossible", "busy")]


def paced() -> ManualDriver:
    """Return two replicas whose iterations take 20 ms with two sequences and 40 ms with five."""
    driver = one_replica("r1", limits={"kv_tokens": 500_000})
    driver.join("r2", "only", kv_tokens=100_000)
    driver.arrive("warm")
    driver.arrive("warm too")
    driver.feed(FirstToken("warm"))
    driver.feed(FirstToken("warm too"))
    for running, tpot_s in ((2, 0.02), (5, 0.04)):
        for _ in range(200):
            driver.report("r1", running=running, tpot_s=tpot_s, after_s=0.01)
            driver.report("r2")
    return driver


def test_other_requests_avoid_a_replica_whose_tokens_must_come_in_time() -> None:
    driver = paced()
    assert driver.find("warm").replica_id == driver.find("warm too").replica_id == "r1"
    assert dispatched(driver.arrive("paced", target=within(tpot_s=0.03))) == [("paced", "r1")]
    driver.feed(FirstToken("paced"))
    # A fourth one would slow it down.
    assert dispatched(driver.arrive("other")) == [("other", "r2")]
    driver.feed(Finished("paced", Outcome.COMPLETED, Usage(prompt_tokens=40, output_tokens=5)))
    assert dispatched(driver.arrive("another")) == [("another", "r1")]


def test_a_pace_never_leaves_capacity_unused() -> None:
    driver = paced()
    driver.arrive("paced", target=within(tpot_s=0.03))
    driver.feed(FirstToken("paced"))
    sent = []
    for number in range(14):
        sent += dispatched(driver.arrive(f"n{number}"))
        driver.feed(FirstToken(f"n{number}"))
    assert [replica for _, replica in sent].count("r1") > 1


def test_a_pace_that_could_not_be_met_keeps_nothing_away() -> None:
    driver = paced()
    driver.arrive("impossible", target=within(tpot_s=0.001))
    driver.feed(FirstToken("impossible"))
    assert dispatched(driver.arrive("other")) == [("other", "r1")]


# Admission.


def overloaded() -> ManualDriver:
    """Return one replica that starts an answer each second, whose targets of 3 s have lately been missed."""
    driver = make_driver()
    fill(driver)
    for number in range(60):
        driver.arrive(f"t{number}", target=within(3.0))
    running = ["f0", "f1", "f2"]
    for _ in range(45):
        later(driver, 1.0)
        commands = driver.feed(FirstToken(running.pop(0)))
        running += [name for name, _ in dispatched(commands)]
        driver.arrive(f"more{driver.now}", target=within(3.0))
    return driver


def test_a_request_that_would_miss_its_target_is_refused_with_a_time_at_which_it_would_not() -> None:
    driver = overloaded()
    refused = driver.arrive("r", target=within(3.0, refuse=True))
    conclusion = only_conclusion(refused)
    assert conclusion.outcome is Outcome.REJECTED_DEADLINE_UNMEETABLE
    assert "the chance to miss the target of 3,000 ms is" in conclusion.message
    later(driver, retry_after_s(refused))
    assert concluded(driver.arrive("r again", target=within(3.0, refuse=True))) == []


def test_a_request_that_does_not_ask_for_it_is_never_refused() -> None:
    driver = overloaded()
    assert driver.arrive("r", target=within(3.0)) == []


@pytest.mark.parametrize(("streamed", "expected"), [(True, False), (False, None)])
def test_the_end_of_an_answer_that_is_not_streamed_tells_nothing_about_its_first_token(
    streamed: bool, expected: bool | None
) -> None:
    driver = make_driver()
    driver.arrive("r", target=within(0.5), streamed=streamed)
    target = driver.find("r").target
    assert target is not None
    later(driver, 2.0)
    driver.feed(FirstToken("r"))
    driver.feed(Finished("r", Outcome.COMPLETED, Usage(prompt_tokens=10, output_tokens=1)))
    assert target.is_met is expected


def test_a_patient_target_is_admitted_beside_refused_ones() -> None:
    driver = overloaded()
    assert only_conclusion(driver.arrive("hasty", target=within(3.0, refuse=True)))
    assert driver.arrive("patient", target=within(600.0, refuse=True)) == []


def test_now_and_then_a_request_is_admitted_to_see_whether_refusals_are_still_right() -> None:
    driver = one_replica("r1")
    driver.arrive("r", target=within(3.0, refuse=True))
    targets, scheduled = driver.scheduler.targets, driver.find("r")
    assert [targets.is_probe(scheduled, now) for now in (1.0, 2.0, 10.5, 11.5, 12.0)] == [
        True,
        False,
        False,
        True,
        False,
    ]


def test_a_target_that_no_replica_could_meet_when_idle_is_refused_without_a_time() -> None:
    driver = one_replica("r1", limits={"kv_tokens": 500_000, "max_model_len": 100_000})
    for number in range(40):
        name = f"r{number}"
        driver.arrive(name, prompt_tokens=20_000, target=within(1.0))
        later(driver, 4.0)
        driver.feed(FirstToken(name))
        driver.feed(Finished(name, Outcome.COMPLETED, Usage(prompt_tokens=20_000, output_tokens=3)))
    conclusion = only_conclusion(driver.arrive("r", prompt_tokens=20_000, target=within(1.0, refuse=True)))
    assert conclusion.retry_after_s is None
    assert "even on an idle replica" in conclusion.message


def test_a_pace_that_no_replica_keeps_is_refused() -> None:
    driver = paced()
    conclusion = only_conclusion(driver.arrive("r", target=within(tpot_s=0.005, refuse=True)))
    assert "ms per output token are expected, and the target is 5 ms" in conclusion.message
    assert conclusion.retry_after_s is not None


# Without targets, and with impossible ones.


def test_an_idle_pool_gets_a_probe_after_slow_tokens_because_nothing_else_would_correct_them() -> None:
    driver = one_replica("r1")
    for name in ("slow", "slow too"):
        driver.arrive(name)
        driver.feed(FirstToken(name))
    for _ in range(200):
        driver.report("r1", running=2, tpot_s=0.1, after_s=0.01)
    within_pace = within(tpot_s=0.05, refuse=True)
    refused = only_conclusion(driver.arrive("beside", target=within_pace))
    assert "ms per output token are expected, and the target is 50 ms" in refused.message
    for name in ("slow", "slow too"):
        driver.feed(Finished(name, Outcome.COMPLETED, Usage(prompt_tokens=40, output_tokens=5)))
    assert dispatched(driver.arrive("probe", target=within_pace)) == [("probe", "r1")]
    driver.feed(Finished("probe", Outcome.COMPLETED, Usage(prompt_tokens=40, output_tokens=5)))
    refused = only_conclusion(driver.arrive("soon after", target=within_pace))
    assert refused.outcome is Outcome.REJECTED_DEADLINE_UNMEETABLE
    later(driver, 11.0)
    assert dispatched(driver.arrive("again", target=within_pace)) == [("again", "r1")]
    driver.report("r1", running=1, tpot_s=0.02, after_s=0.1)
    driver.feed(Finished("again", Outcome.COMPLETED, Usage(prompt_tokens=40, output_tokens=5)))
    assert dispatched(driver.arrive("fast", target=within_pace)) == [("fast", "r1")]


def test_impossible_targets_change_no_decision() -> None:
    runs = []
    for target in (None, within(0.001)):
        driver, log = make_driver(), []
        running: list[str] = []
        for number in range(80):
            claims = target if number % 3 == 0 else None
            commands = driver.arrive(f"r{number}", tenant=f"t{number % 3}", target=claims)
            if running and number % 2:
                commands += driver.feed(FirstToken(running.pop(0)), after_s=0.2)
            running += [name for name, _ in dispatched(commands)]
            log += dispatched(commands)
        runs.append(log)
    assert runs[0] == runs[1]


# The chance of a miss.


@given(st.lists(st.floats(0.01, 40.0), max_size=200), st.floats(0.01, 0.99))
def test_the_chance_never_falls_with_the_expected_share_and_the_limit_separates_it(
    ratios: list[float], chance: float
) -> None:
    learned = MissChance()
    for ratio in ratios:
        learned.learn(ratio, 1.0, 0.0)
    shares = [2.0 ** (0.1 * place) for place in range(-60, 60)]
    chances = [learned.chance(share) for share in shares]
    assert chances == sorted(chances)
    assert all(0.0 <= each <= 1.0 for each in chances)
    limit = learned.limit(chance)
    for share in shares:
        if share > 1 / 16 and not math.isclose(share, limit):
            assert (learned.chance(share) <= chance) == (share < limit)


def test_the_chance_follows_what_happens() -> None:
    learned = MissChance()
    assert (learned.chance(0.9), learned.chance(1.0)) == (0.0, 1.0)
    for number in range(800):
        learned.learn((0.5, 0.5, 1.5, 3.0)[number % 4], 1.0, 0.0)
    assert learned.chance(0.25) == pytest.approx(0.0)
    assert learned.chance(0.5) == pytest.approx(0.25, abs=0.02)
    assert learned.chance(1.0) == pytest.approx(0.5, abs=0.02)
    assert learned.chance(4.0) == pytest.approx(1.0)
    assert learned.limit(0.3) == pytest.approx(1 / 1.5, rel=0.1)


def test_the_chance_counts_the_time_since_the_arrival() -> None:
    driver = make_driver()
    fill(driver)
    driver.arrive("waits", target=within(3.0))
    later(driver, 2.0)
    assert dispatched(driver.feed(FirstToken("f0"))) == [("waits", "r1")]
    driver.feed(FirstToken("waits"))
    driver.arrive("next", target=within(3.0))
    target = driver.find("next").target
    assert target is not None
    assert target.chance == pytest.approx(1 / 3, abs=0.01)


# The work ahead.


@given(
    st.lists(
        st.tuples(st.sampled_from(list(PriorityClass)), st.floats(1.0, 500.0), st.integers(1, 3_000)),
        max_size=30,
    ),
    st.data(),
)
def test_the_work_ahead_is_that_of_more_urgent_requests_of_the_class_and_those_before_it(
    requests: list[tuple[PriorityClass, float, int]], data: st.DataObject
) -> None:
    work, queued = _WorkByTime(), []
    for priority, at, tokens in requests:
        work.add(priority.rank, at, tokens)
        queued.append((priority.rank, at, tokens))
        if data.draw(st.booleans()):
            rank, when, left = queued.pop(data.draw(st.integers(0, len(queued) - 1)))
            work.add(rank, when, -left)
    rank, at = data.draw(st.integers(0, 2)), data.draw(st.floats(0.0, 600.0))
    # To a tenth of a second.
    least = sum(tokens for of, when, tokens in queued if of <= rank and when <= at - 0.1)
    most = sum(tokens for of, when, tokens in queued if of <= rank and when <= at + 0.1)
    assert least <= work.until(rank, at) <= most
    for of, when, tokens in queued:
        work.add(of, when, -tokens)
    assert not any(work._trees.values())


def test_requests_that_leave_the_queue_or_their_precedence_are_no_work_ahead() -> None:
    driver = make_driver()
    fill(driver)
    for number in range(20):
        driver.arrive(f"w{number}", target=within(2.0 + number))
    work = driver.scheduler.targets._work
    assert work.until(2, 100.0) > 0
    later(driver, 8.0)
    for number in range(20):
        driver.feed(Cancelled(f"w{number}"))
    assert not any(work._trees.values())


def test_a_request_with_a_pace_only_waits_behind_all_work_with_a_target() -> None:
    driver = overloaded()
    driver.arrive("paced", target=within(tpot_s=0.5))
    driver.arrive("patient", target=within(600.0))
    paced, patient = driver.find("paced").target, driver.find("patient").target
    assert paced is not None
    assert patient is not None
    assert patient.wait_s == paced.wait_s > 0.0


def test_an_arrival_does_not_look_at_every_queued_request_with_a_target() -> None:
    calls = {}
    for waiting in (50, 400):
        driver = make_driver()
        fill(driver)
        for number in range(waiting):
            driver.arrive(f"w{number}", target=within(300.0))
        profile = cProfile.Profile()
        profile.runcall(driver.scheduler.targets.expect, driver.find("w0"), 1_000.0, waits=True)
        calls[waiting] = sum(each.callcount for each in profile.getstats())
    assert calls[400] < 1.3 * calls[50]
