"""A minute at twice the engines' capacity: predictions and `Retry-After` must hold."""

import random
from dataclasses import dataclass
from statistics import mean

import pytest

from serve_app.errors import Outcome
from serve_app.request import Request
from tests.builders import request
from tests.core.admission.overload import Attempt, OverloadSimulation, poisson

DEADLINE_S, MINUTE_S, END_S = 5.0, 60.0, 200.0
MEAN_PROMPT, MEAN_OUTPUT = 200, 100


def arrivals(seed: int, per_s: float, *, tenants: int = 1) -> list[tuple[Request, int]]:
    rng = random.Random(seed)
    return [
        (
            request(
                f"r{number}",
                prompt_tokens=rng.randint(MEAN_PROMPT - 180, MEAN_PROMPT + 180),
                max_output_tokens=2 * MEAN_OUTPUT,
                arrived_at=at,
                expires_at=at + DEADLINE_S,
                tenant=f"t{rng.randrange(tenants)}",
            ),
            rng.randint(MEAN_OUTPUT - 80, MEAN_OUTPUT + 80),
        )
        for number, at in enumerate(poisson(rng, per_s, MINUTE_S))
    ]


@dataclass
class Played:
    simulation: OverloadSimulation
    attempts: list[Attempt]

    @property
    def accepted(self) -> list[Attempt]:
        return [
            attempt for attempt in self.attempts if attempt.outcome in {Outcome.COMPLETED, Outcome.EXPIRED}
        ]

    @property
    def retries(self) -> list[Attempt]:
        return [attempt for attempt in self.attempts if attempt.number > 0]

    def __str__(self) -> str:
        errors = self.simulation.scheduler.admission.predictor.errors
        outcomes = {outcome: self.count(outcome) for outcome in Outcome if self.count(outcome)}
        return (
            f"{len(self.attempts)} attempts {outcomes}, {len(self.retries)} retries of which "
            f"{self.retries_accepted_ratio:.1%} were admitted; predicted minus actual wait: "
            f"mean {errors.mean_s:.2f} s, size {errors.mean_absolute_s:.2f} s over {errors.count}"
        )

    def count(self, outcome: Outcome) -> int:
        return sum(attempt.outcome is outcome for attempt in self.attempts)

    @property
    def retries_accepted_ratio(self) -> float:
        return sum(attempt.accepted for attempt in self.retries) / max(1, len(self.retries))


def play(seed: int, load: float, *, tenants: int = 1, retries: int = 3, policy: str = "fcfs") -> Played:
    simulation = OverloadSimulation(retries=retries, policy=policy)
    per_s = load * simulation.capacity_per_s(MEAN_PROMPT, MEAN_OUTPUT)
    simulation.run(arrivals(seed, per_s, tenants=tenants), END_S)
    return Played(simulation, list(simulation.attempts.values()))


@pytest.mark.application
@pytest.mark.parametrize(
    ("policy", "admitted", "expired"),
    # With a score, an unknown number of later requests may pass, so some reservations do not hold.
    [("fcfs", 0.95, 0.01), ("ewsjf", 0.89, 0.03)],
)
def test_at_twice_the_capacity_retries_are_admitted_and_deadlines_are_met(
    policy: str, admitted: float, expired: float
) -> None:
    plays = [play(seed, 2.0, tenants=tenants, policy=policy) for seed, tenants in ((1, 1), (2, 1), (1, 5))]
    for played in plays:
        assert len(played.retries) > 300, played
        delays_s = [each.retry_after_s for each in played.attempts if each.retry_after_s is not None]
        assert 0 < min(delays_s) <= max(delays_s) <= 60.0
        scheduler = played.simulation.scheduler
        assert len(scheduler) == 0
        assert len(scheduler.admission.retry_reservations) == 0
        assert scheduler.admission.predictor.errors.expired == played.count(Outcome.EXPIRED)
    assert mean(played.retries_accepted_ratio for played in plays) >= admitted, plays
    expired_ratios = [played.count(Outcome.EXPIRED) / len(played.accepted) for played in plays]
    assert mean(expired_ratios) <= expired, plays
    errors = [played.simulation.scheduler.admission.predictor.errors for played in plays]
    assert mean(each.mean_absolute_s for each in errors) < DEADLINE_S / 5, plays


def test_below_the_capacity_no_request_is_rejected() -> None:
    played = play(1, 0.9)
    assert played.count(Outcome.COMPLETED) == len(played.attempts), played


@pytest.mark.application
def test_clients_that_never_return_cost_no_throughput() -> None:
    """Unclaimed reservations must not exclude others: the engines stay busy for the whole minute."""
    played = play(1, 2.0, retries=0)
    capacity = MINUTE_S * played.simulation.capacity_per_s(MEAN_PROMPT, MEAN_OUTPUT)
    assert played.count(Outcome.COMPLETED) > 0.95 * capacity, played
    assert played.count(Outcome.EXPIRED) <= 0.02 * len(played.accepted), played
