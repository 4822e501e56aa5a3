import math
import random
import statistics

import pytest

from serve_app.core.routing.adaptive_b_short import EDGES, Demand, PoolCapacity, bucket_of, last_bucket_within

POOL = PoolCapacity(kv_tokens=100_000, sequences=1_000, context_tokens=16_384)
MEMORY_S = 60.0


def test_the_grid_has_eight_buckets_per_factor_of_two() -> None:
    assert EDGES[bucket_of(1_024)] == EDGES[last_bucket_within(1_024)] == 1_024
    assert bucket_of(2_048) - bucket_of(1_024) == 8
    assert EDGES[bucket_of(1_025)] > 1_025 > EDGES[last_bucket_within(1_025)]
    assert last_bucket_within(0) == bucket_of(1) == 0
    assert bucket_of(10**9) == len(EDGES) - 1


def test_the_mean_is_of_what_was_present_and_decays_afterwards() -> None:
    demand = Demand(MEMORY_S)
    marks = [demand.on_arrival(1_000, 800) for _ in range(5)]
    boundary = last_bucket_within(2_000)
    for second in range(601):
        demand.sample(float(second))
    assert demand.loads(POOL, POOL, 1.0).short(boundary) == pytest.approx(5 * 800 / 100_000, rel=1e-3)
    assert len(demand) == 5
    for each in marks:
        demand.on_departure(1_000, 800, each)
    demand.sample(660.0)
    assert demand.loads(POOL, POOL, 1.0).short(boundary) == pytest.approx(0.04 / math.e, rel=1e-3)
    assert len(demand) == 0


def test_the_scarcer_resource_is_the_load_and_a_faster_pool_has_less_of_it() -> None:
    demand = Demand(MEMORY_S)
    for _ in range(200):
        demand.on_arrival(100, 100)
    for _ in range(10):
        demand.on_arrival(9_000, 9_000)
    for second in range(601):
        demand.sample(float(second))
    boundary = last_bucket_within(1_000)
    loads = demand.loads(POOL, POOL, 1.0)
    assert loads.short(boundary) == pytest.approx(0.2, rel=1e-3)  # batch slots
    assert loads.long(boundary) == pytest.approx(0.9, rel=1e-3)  # tokens
    assert demand.loads(POOL, POOL, 2.0).short(boundary) == pytest.approx(0.1, rel=1e-3)
    assert loads.imbalance(boundary) == pytest.approx(-0.7 / 1.1, rel=1e-3)


def test_the_loads_are_unknown_without_requests() -> None:
    demand = Demand(MEMORY_S)
    demand.sample(0.0)
    loads = demand.loads(POOL, POOL, 1.0)
    assert loads.imbalance(50) == 0.0
    assert loads.standard_error(50) == math.inf
    assert loads.best(range(40, 60), 50) == 50
    assert loads.best(range(0), 50) == 50


def test_the_variance_is_the_sum_of_the_squares_of_what_each_request_adds() -> None:
    demand, rng = Demand(MEMORY_S), random.Random(3)
    # (arrival, end, tokens), all between the first sample and the last.
    stays = [
        (a := rng.uniform(0, 200), a + rng.expovariate(1 / 20), rng.randint(900, 1_000)) for _ in range(300)
    ]
    marks: dict[int, float] = {}
    gone: set[int] = set()
    adds = [0.0] * len(stays)
    kept = math.exp(-1 / MEMORY_S)
    for second in range(201):
        demand.sample(float(second))
        adds = [kept * add for add in adds]
        for number, (_, _, tokens) in enumerate(stays):
            if number in marks and number not in gone:
                adds[number] += (1 - kept) * tokens
        for number, (at, until, tokens) in enumerate(stays):
            if number not in marks and at <= second:
                marks[number] = demand.on_arrival(1_000, tokens)
            if number in marks and number not in gone and until <= second:
                demand.on_departure(1_000, tokens, marks[number])
                gone.add(number)
    loads = demand.loads(POOL, POOL, 1.0)
    boundary = bucket_of(1_000)
    assert loads.short(boundary) == pytest.approx(sum(adds) / 100_000)
    expected = math.sqrt(sum(add * add for add in adds)) / sum(adds)
    assert loads.standard_error(boundary) == pytest.approx(expected)


@pytest.mark.parametrize("width", [0.3, 1.4])
def test_the_standard_error_is_the_deviation_of_the_imbalance(width: float) -> None:
    """One lognormal of lengths; longer requests stay longer. Loads are even at its weighted median."""
    rng = random.Random(7)
    demand = Demand(MEMORY_S)
    stay_s = 0.004
    # Demand is the square of the length here, which moves the median by twice the variance.
    boundary = last_bucket_within(round(1_000 * math.exp(2 * (width * math.log(2)) ** 2)))
    now, leaves, found = 0.0, list[tuple[float, int, float]](), list[tuple[float, float]]()
    for second in range(6_000):
        for each in sorted(one for one in leaves if one[0] <= second):
            demand.on_departure(each[1], each[1], each[2])
        leaves = [one for one in leaves if one[0] > second]
        demand.sample(float(second))
        if second > 600 and second % 30 == 0:
            loads = demand.loads(POOL, POOL, 1.0)
            found.append((loads.imbalance(boundary), loads.standard_error(boundary)))
        while now <= second:
            now += rng.expovariate(4.0)
            tokens = min(round(1_000 * 2 ** rng.gauss(0, width)), 60_000)
            leaves.append(
                (now + rng.expovariate(1 / (stay_s * tokens)), tokens, demand.on_arrival(tokens, tokens))
            )
    real = statistics.pstdev(imbalance for imbalance, _ in found)
    assert statistics.fmean(error for _, error in found) == pytest.approx(real, rel=0.25)
