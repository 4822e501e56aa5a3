"""Twice as much as the engines can do for a minute: what clients were told must have come true."""

import random
from dataclasses import dataclass

import pytest

from serve_app.errors import Outcome
from serve_app.request import Request
from tests.builders import request
from tests.scheduling.admission.overload import OverloadedWorld, Visit, poisson

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
    world: OverloadedWorld
    visits: list[Visit]

    @property
    def accepted(self) -> list[Visit]:
        return [visit for visit in self.visits if visit.outcome in {Outcome.COMPLETED, Outcome.EXPIRED}]

    @property
    def retries(self) -> list[Visit]:
        return [visit for visit in self.visits if visit.tries > 0]

    def __str__(self) -> str:
        errors = self.world.scheduler.admission.predictor.errors
        outcomes = {outcome: self.count(outcome) for outcome in Outcome if self.count(outcome)}
        return (
            f"{len(self.visits)} visits {outcomes}, {len(self.retries)} retries of which "
            f"{self.retries_accepted_ratio:.1%} were let in; predicted minus actual wait: "
            f"mean {errors.mean_s:.2f} s, size {errors.mean_absolute_s:.2f} s over {errors.count}"
        )

    def count(self, outcome: Outcome) -> int:
        return sum(visit.outcome is outcome for visit in self.visits)

    @property
    def retries_accepted_ratio(self) -> float:
        return sum(visit.accepted for visit in self.retries) / max(1, len(self.retries))


def play(seed: int, load: float, *, tenants: int = 1, retries: int = 3, policy: str = "fcfs") -> Played:
    world = OverloadedWorld(retries=retries, policy=policy)
    per_s = load * world.capacity_per_s(MEAN_PROMPT, MEAN_OUTPUT)
    world.run(arrivals(seed, per_s, tenants=tenants), END_S)
    return Played(world, list(world.visits.values()))


@pytest.mark.parametrize(
    ("policy", "let_in", "expired"),
    # Under a score those who come later may pass, and nobody can know how many will: promises are broken.
    [("fcfs", 0.9, 0.02), ("ewsjf", 0.86, 0.07)],
)
@pytest.mark.parametrize(("seed", "tenants"), [(1, 1), (2, 1), (1, 5)])
def test_at_twice_the_capacity_retries_are_let_in_and_deadlines_are_met(
    seed: int, tenants: int, policy: str, let_in: float, expired: float
) -> None:
    played = play(seed, 2.0, tenants=tenants, policy=policy)
    assert len(played.retries) > 300, played
    assert played.retries_accepted_ratio >= let_in, played
    assert played.count(Outcome.EXPIRED) <= expired * len(played.accepted), played
    assert played.world.scheduler.admission.predictor.errors.mean_absolute_s < DEADLINE_S / 5, played
    told = [visit.retry_after_s for visit in played.visits if visit.retry_after_s is not None]
    assert 0 < min(told) <= max(told) <= 60.0
    assert len(played.world.scheduler) == 0
    assert len(played.world.scheduler.admission.retry_reservations) == 0


def test_below_the_capacity_nobody_is_refused() -> None:
    played = play(1, 0.9)
    assert played.count(Outcome.COMPLETED) == len(played.visits), played


def test_clients_that_never_come_back_cost_no_throughput() -> None:
    """RetryReservations that nobody claims must not keep others out: the engines stay busy for the whole minute."""
    played = play(1, 2.0, retries=0)
    capacity = MINUTE_S * played.world.capacity_per_s(MEAN_PROMPT, MEAN_OUTPUT)
    assert played.count(Outcome.COMPLETED) > 0.95 * capacity, played
    assert played.count(Outcome.EXPIRED) <= 0.02 * len(played.accepted), played
