import pytest
from hypothesis import given
from hypothesis import strategies as st

from serve_app.request import Usage
from serve_app.scheduling.queueing.fairness import FairnessMode, FairnessSettings, FairShares
from tests.builders import Simulation, request


def shares(**settings: object) -> FairShares:
    return FairShares(FairnessSettings(**settings))  # type: ignore[arg-type]


def serve(books: FairShares, cost: float = 1.0) -> str:
    """The first in turn is served, and goes on waiting."""
    name = next(books.turns())[0]
    books.charge(name, cost)
    return name


def test_one_that_comes_is_served_before_anybody_is_served_twice() -> None:
    books = shares(mode="requests")
    books.on_arrival("heavy")
    for _ in range(50):
        serve(books)
    books.on_arrival("light")
    books.on_arrival("lighter")
    turn = next(books.turns())
    assert sorted(turn) == ["light", "lighter"]
    assert [serve(books), serve(books)] == ["light", "lighter"]


def test_shares_follow_the_weights() -> None:
    books = shares(mode="tokens", weights={"b": 2.0, "c": 4.0})
    for name in ("a", "b", "c"):
        books.on_arrival(name)
    cost = {"a": 300.0, "b": 50.0, "c": 1_000.0}
    got = dict.fromkeys(cost, 0.0)
    for _ in range(5_000):
        name = next(books.turns())[0]
        books.charge(name, cost[name])
        got[name] += cost[name]
    assert got["b"] / got["a"] == pytest.approx(2.0, rel=0.02)
    assert got["c"] / got["a"] == pytest.approx(4.0, rel=0.02)


def test_a_charge_is_corrected() -> None:
    books = shares()
    books.on_arrival("a")
    books.charge("a", 100.0)
    books.correct("a", -60.0)
    assert books.counters() == {"a": 40.0}


def test_idling_earns_no_claim() -> None:
    books = shares(mode="requests", quantum_requests=0.0)
    books.on_arrival("busy")
    for _ in range(10):
        serve(books)
    books.on_arrival("back")
    # Once for the lift, then in turns: ten in a row would be a claim on the time before.
    assert [serve(books) for _ in range(6)].count("back") == 3


@given(
    costs=st.lists(st.sampled_from([10.0, 100.0, 700.0]), min_size=4, max_size=4),
    weights=st.lists(st.sampled_from([1.0, 2.0, 4.0]), min_size=4, max_size=4),
)
def test_service_by_weight_stays_within_a_quantum_and_a_request(
    costs: list[float], weights: list[float]
) -> None:
    names = [f"t{number}" for number in range(4)]
    books = shares(weights=dict(zip(names, weights, strict=True)))
    for name in names:
        books.on_arrival(name)
    for _ in range(300):
        name = next(books.turns())[-1]
        books.charge(name, costs[names.index(name)])
    counters = books.counters().values()
    # The quantum is a mean cost, which is never above the largest.
    assert max(counters) - min(counters) <= 2 * max(costs)


@given(
    st.lists(
        st.tuples(st.integers(0, 5), st.sampled_from(["came", "went", "charge", "correct"])), max_size=80
    )
)
def test_everybody_who_waits_is_named_exactly_once(steps: list[tuple[int, str]]) -> None:
    books, waiting = shares(), set[str]()
    for number, step in steps:
        name = f"t{number}"
        if step == "came" and name not in waiting:
            books.on_arrival(name)
            waiting.add(name)
        elif step == "went" and name in waiting:
            books.went(name)
            waiting.remove(name)
        elif step == "charge":
            books.charge(name, 7.0)
        elif step == "correct":
            books.correct(name, -3.0)
        named = [one for turn in books.turns() for one in turn]
        assert sorted(named) == sorted(waiting)


def test_tenants_that_owe_nothing_are_forgotten() -> None:
    books = shares(mode="requests")
    for number in range(20_000):
        books.on_arrival(f"t{number}")
        books.charge(f"t{number}", 1.0)
        books.went(f"t{number}")
    assert len(books.counters()) < 5_000


def test_costs_are_those_of_the_mode() -> None:
    wanted = request("r", prompt_tokens=100, max_output_tokens=50)
    estimate = Simulation().scheduler.estimator.estimate(wanted)
    tokens = FairnessSettings(decode_weight=3.0)
    output = estimate.expected_tokens - estimate.expected_prompt_tokens
    assert tokens.expected_cost(estimate) == estimate.expected_prompt_tokens + 3.0 * output
    assert tokens.real_cost(Usage(prompt_tokens=100, output_tokens=10, cached_tokens=64)) == 36 + 30
    requests = FairnessSettings(mode=FairnessMode.REQUESTS)
    assert (
        requests.expected_cost(estimate) == requests.real_cost(Usage(prompt_tokens=9, output_tokens=9)) == 1
    )


@pytest.mark.parametrize(
    ("values", "complaint"),
    [
        ({"weights": {"a": 0.0}}, "fairness.weights of tenant 'a' must be positive, got 0.0"),
        ({"decode_weight": -1.0}, "fairness.decode_weight must not be negative, got -1.0"),
        ({"prefill_weight": 0.0, "decode_weight": 0.0}, "service must cost something"),
    ],
)
def test_settings_that_make_no_sense_are_refused(values: dict[str, object], complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        shares(**values)


def test_nobody_owes_for_what_it_had_when_nobody_waited() -> None:
    books = shares(mode="requests", quantum_requests=0.0)
    for _ in range(500):
        books.on_arrival("early")
        books.charge("early", 1.0)
        books.went("early")
    books.on_arrival("early")
    books.on_arrival("late")
    assert [serve(books) for _ in range(10)].count("early") == 5


def test_a_lead_that_others_could_not_prevent_is_owed_up_to_a_bound() -> None:
    """One that cannot go, as its requests are too long, does not lock the other out for all that time."""
    books = shares(mode="requests", quantum_requests=0.0, max_lead_requests=10.0)
    books.on_arrival("stuck")
    books.on_arrival("fits")
    for _ in range(200):
        books.charge("fits", 1.0)
    assert books.behind_requests("stuck") == pytest.approx(10.0)
    assert books.behind_requests("fits") == 0.0
    served = [serve(books) for _ in range(14)]
    assert served.count("fits") == 2


def test_nobody_is_behind_when_nobody_else_waits() -> None:
    books = shares()
    books.on_arrival("a")
    books.charge("a", 5.0)
    assert books.behind_requests("a") == 0.0
    assert books.behind_requests("nobody") == 0.0
