"""Order among the parked turns: which is admitted first when a replica gets room."""

import math

import pytest

from serve_app.core.events import Cancelled, FirstToken
from serve_app.core.queueing.fairness import FairnessMode, FairnessSettings
from serve_app.core.settings import ProgramOrder, ProgramsSettings
from serve_app.request import PriorityClass
from tests.builders import dispatched
from tests.core.programs.builders import ProgramDriver, fleet

SMALL = 1_000


def full(order: ProgramOrder = ProgramOrder.FCFS, *, joins: bool = True, **changes: object) -> ProgramDriver:
    """Return a replica that retains no context in a gap, so that only running turns take room."""
    programs = ProgramsSettings(order=order, joins=joins, retention=0.0)
    return fleet("s1", programs=programs, **changes)  # type: ignore[arg-type]


def hold(driver: ProgramDriver, **fields: object) -> None:
    """Run a turn beside which none of 60,000 tokens fits."""
    assert dispatched(driver.start_turn("hold", "hold", **fields)) == [("hold", "s1")]  # type: ignore[arg-type]
    driver.feed(FirstToken("hold"))


def park(driver: ProgramDriver, *request_ids: str, **fields: object) -> None:
    """Submit turns, each of its own session, a second after each other."""
    for request_id in request_ids:
        driver.now += 1.0
        assert driver.start_turn(request_id, request_id, **fields) == []  # type: ignore[arg-type]


def begin(driver: ProgramDriver, program: str, *, context: int = SMALL) -> None:
    """Run and end the first turn of a program."""
    driver.now += 1.0
    driver.start_turn(f"{program}-first", program, prompt_tokens=SMALL, program=program)
    driver.end_turn(f"{program}-first", context=context)


def admitted(driver: ProgramDriver) -> list[str]:
    """Return the parked turns as they are dispatched when turns end one after the other."""
    running, found = ["hold"], list[str]()
    while running:
        now_running = [name for name, _ in dispatched(driver.end_turn(running.pop(0)))]
        running += now_running
        found += now_running
    return found


@pytest.mark.parametrize(
    ("order", "expected"), [(ProgramOrder.FCFS, "cab"), (ProgramOrder.LEAST_SERVICE, "bca")]
)
def test_programs_are_admitted_by_their_start_or_their_service(order: ProgramOrder, expected: str) -> None:
    driver = full(order)
    for program, context in (("c", 20_000), ("a", 40_000), ("b", SMALL)):
        begin(driver, program, context=context)
    hold(driver)
    for program in "abc":
        park(driver, program * 2, program=program)
    assert admitted(driver) == [name * 2 for name in expected]


def test_turns_of_one_program_are_admitted_in_the_order_of_arrival() -> None:
    driver = full()
    hold(driver)
    park(driver, "c", "a", "b", program="p")
    assert admitted(driver) == ["c", "a", "b"]


@pytest.mark.parametrize(("joins", "expected"), [(True, ["last", "early1"]), (False, ["early1", "last"])])
def test_the_last_open_agent_of_a_program_is_first(joins: bool, expected: list[str]) -> None:
    driver = full(joins=joins)
    begin(driver, "early")
    begin(driver, "late")
    hold(driver)
    park(driver, "early1", program="early")
    park(driver, "last", program="late", parent="late")
    assert admitted(driver) == expected


def test_an_agent_is_preferred_once_the_other_agents_of_its_program_have_ended() -> None:
    driver = full()
    begin(driver, "early")
    begin(driver, "late")
    hold(driver)
    driver.start_turn("other", "other", prompt_tokens=SMALL, program="late", parent="late")
    park(driver, "early1", "early2", program="early")
    park(driver, "last", program="late", parent="late")
    assert dispatched(driver.end_turn("hold")) == [("early1", "s1")]
    assert dispatched(driver.end_turn("other", context=SMALL)) == []
    assert dispatched(driver.end_turn("early1")) == [("last", "s1")]


def test_higher_classes_are_first() -> None:
    driver = full()
    hold(driver)
    for priority in reversed(PriorityClass):
        park(driver, priority.name, priority=priority)
    assert admitted(driver) == [priority.name for priority in PriorityClass]


@pytest.mark.parametrize(("mode", "expected"), [(FairnessMode.TOKENS, "bac"), (FairnessMode.OFF, "abc")])
def test_tenants_are_in_the_order_of_their_shares(mode: FairnessMode, expected: str) -> None:
    driver = full(fairness=FairnessSettings(mode=mode))
    hold(driver, tenant="much")
    for name, tenant in (("a", "much"), ("b", "little"), ("c", "much")):
        park(driver, name, tenant=tenant)
    assert admitted(driver) == list(expected)


def test_tenants_whose_turns_have_left_do_not_disturb_the_others() -> None:
    driver = full()
    hold(driver)
    park(driver, "a", "b")
    for number in range(9):
        session = f"served{number}"
        driver.start_turn(session, session, prompt_tokens=30_000, tenant="served")
        driver.end_turn(session, context=30_000)
    # So many that the shares forget them.
    for number in range(4_200):
        driver.start_turn(f"gone{number}", f"gone{number}", tenant=f"gone{number}")
        driver.feed(Cancelled(f"gone{number}"))
    # It is tried after all others.
    small = driver.start_turn("small", "small", prompt_tokens=30_000, tenant="served")
    assert dispatched(small) == [("small", "s1")]


@pytest.mark.parametrize(("large", "is_tried"), [(7, True), (8, False)])
@pytest.mark.parametrize("mode", [FairnessMode.TOKENS, FairnessMode.OFF])
def test_few_turns_of_each_tenant_are_tried(mode: FairnessMode, large: int, is_tried: bool) -> None:
    driver = full(fairness=FairnessSettings(mode=mode))
    hold(driver)
    park(driver, *(f"large{number}" for number in range(large)))
    for _ in range(2):
        driver.now += 1.0
        assert bool(driver.start_turn("small", "small", prompt_tokens=30_000)) is is_tried
        driver.feed(Cancelled("small"))


def test_all_that_fit_are_admitted_at_once() -> None:
    driver = full()
    hold(driver, prompt_tokens=80_000)
    park(driver, "a", "b", "c", prompt_tokens=30_000)
    driver.end_turn("hold")
    assert [driver.find(name).resident_on for name in "abc"] == ["s1"] * 3
    assert repr(driver.programs.parked) == "<ParkedTurns 0 of 0 programs>"


@pytest.mark.parametrize("cancelled", [[], ["large"], ["small"], ["large", "small"]])
def test_a_turn_that_fits_is_found_whichever_others_have_left(cancelled: list[str]) -> None:
    driver = full()
    hold(driver, prompt_tokens=50_000)
    assert dispatched(driver.start_turn("beside", "beside", prompt_tokens=40_000)) == [("beside", "s1")]
    driver.feed(FirstToken("beside"))
    for name, tokens in (("large", 70_000), ("other", 65_000), ("small", 30_000), ("fits", 35_000)):
        park(driver, name, prompt_tokens=tokens)
    for name in cancelled:
        driver.feed(Cancelled(name))
    expected = "fits" if "small" in cancelled else "small"
    assert dispatched(driver.end_turn("beside")) == [(expected, "s1")]
    for name in {"large", "other", "small", "fits"} - {expected, *cancelled}:
        driver.feed(Cancelled(name))
    assert driver.programs.parked.fewest_tokens == math.inf
