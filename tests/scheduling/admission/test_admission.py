import pytest

from serve_app.errors import Outcome
from serve_app.request import PriorityClass
from serve_app.routing.pools import RoutingSettings
from serve_app.scheduling.admission.settings import AdmissionSettings
from serve_app.scheduling.commands import Command, Conclude
from serve_app.scheduling.events import Finished
from tests.builders import Simulation, concluded, dispatched

SHORT_ALONE = RoutingSettings(pools=("short",))


def saturated(**changes: object) -> Simulation:
    """One replica whose engine takes no more."""
    world = Simulation(routing=SHORT_ALONE, **changes)
    world.join("s1", max_num_seqs=1)
    for number in range(3):
        world.arrive(f"f{number}", tenant="filler")
    return world


def settled() -> Simulation:
    """Eight requests wait, as long as anybody can remember, and one leaves a second."""
    world = saturated()
    for number in range(8):
        world.arrive(f"w{number}", tenant="filler")
    for number in range(8, 60):
        world.arrive(f"w{number}", tenant="filler")
        finish_oldest(world)
    return world


def finish_oldest(world: Simulation) -> None:
    """A second later one request has been served and another one goes."""
    running = [scheduled for scheduled in world.scheduler.requests_of("g1") if not scheduled.queued]
    oldest = min(running, key=lambda scheduled: scheduled.sequence)
    world.report(waiting=3, after_s=1.0)
    assert len(dispatched(world.feed(Finished(oldest.request.request_id, Outcome.COMPLETED)))) == 1


def refusal(commands: list[Command]) -> Conclude:
    (command,) = commands
    assert isinstance(command, Conclude)
    return command


def test_a_deadline_that_cannot_be_met_is_refused_at_the_door_with_a_time_to_come_again() -> None:
    world = settled()
    waiting = len(world.scheduler.queue)
    assert waiting == 8
    command = refusal(world.arrive("r", tenant="filler", expires_at=world.now + 4.0))
    assert command.conclusion.outcome is Outcome.REJECTED_DEADLINE_UNMEETABLE
    assert "may wait 4.0 s" in command.conclusion.message
    # Eight seconds of work are to come down to four, less the margin.
    assert command.conclusion.retry_after_s == pytest.approx(waiting - 4.0 / 1.2, abs=2.0)
    assert world.arrive("patient", tenant="filler", expires_at=world.now + 20.0) == []


def test_no_deadline_is_refused_before_waits_have_been_seen() -> None:
    world = saturated()
    for number in range(40):
        assert world.arrive(f"w{number}", expires_at=0.5) == []


def test_one_that_comes_back_when_told_is_let_in_before_newcomers() -> None:
    world = settled()
    first = refusal(world.arrive("r1", prompt_tokens=33, tenant="filler", expires_at=world.now + 4.0))
    assert first.conclusion.retry_after_s is not None
    until, number = world.now + first.conclusion.retry_after_s, 0
    while world.now + 1.0 < until:
        finish_oldest(world)
        number += 1
        newcomer = world.arrive(f"n{number}", tenant="filler", expires_at=world.now + 4.0)
        assert refusal(newcomer).conclusion.retry_after_s is not None
        assert world.now + (refusal(newcomer).conclusion.retry_after_s or 0.0) > until
    world.now = until
    assert world.arrive("r1 again", prompt_tokens=33, tenant="filler", expires_at=world.now + 4.0) == []


def test_one_that_asked_not_to_wait_is_refused_when_it_would_have_to() -> None:
    command = refusal(saturated().arrive("r", no_wait=True))
    assert command.conclusion.outcome is Outcome.REJECTED_QUEUE_FULL
    assert command.conclusion.retry_after_s is not None
    assert command.conclusion.retry_after_s > 0


def test_a_full_queue_does_not_keep_out_who_can_go_at_once() -> None:
    world = Simulation(max_waiting=1)
    world.join("s1", "short", max_num_seqs=1)
    world.join("l1", "long", max_model_len=4_000)
    for number in range(3):
        world.arrive(f"long{number}", prompt_tokens=2_000)
    world.arrive("waits", prompt_tokens=2_000)
    assert concluded(world.arrive("long", prompt_tokens=2_000)) == [("long", "rejected_queue_full")]
    assert dispatched(world.arrive("short", prompt_tokens=20)) == [("short", "s1")]


def test_a_heavy_tenant_is_refused_while_a_light_one_finds_a_place() -> None:
    world = saturated(max_waiting=20)
    heavy = [world.arrive(f"h{number}", tenant="heavy") for number in range(30)]
    assert sum(commands == [] for commands in heavy) == 15
    assert concluded(heavy[-1]) == [("h29", "rejected_queue_full")]
    assert "of this tenant" in refusal(heavy[-1]).conclusion.message
    assert world.arrive("light", tenant="light") == []


def test_a_place_for_every_tenant_is_left_however_many_are_heavy() -> None:
    world = saturated(max_waiting=40)
    for number in range(200):
        world.arrive(f"h{number}", tenant=f"heavy{number % 3}")
    assert world.arrive("light", tenant="light") == []


@pytest.mark.parametrize(
    ("priority", "places"),
    [(PriorityClass.BATCH, 16), (PriorityClass.DEFAULT, 18), (PriorityClass.INTERACTIVE, 20)],
)
def test_higher_classes_find_places_that_lower_ones_leave_free(priority: PriorityClass, places: int) -> None:
    world = saturated(max_waiting=20, admission=AdmissionSettings(tenant_share=1.0))
    answers = [world.arrive(f"r{number}", priority=priority) for number in range(25)]
    assert sum(commands == [] for commands in answers) == places


def test_an_expired_request_is_told_when_to_come_again() -> None:
    world = settled()
    world.arrive("r", tenant="filler", expires_at=world.now + 20.0)
    commands = world.report(waiting=3, after_s=20.0)
    (conclude,) = [command for command in commands if isinstance(command, Conclude)]
    assert conclude.conclusion.outcome is Outcome.EXPIRED
    assert conclude.conclusion.retry_after_s is not None
    assert conclude.conclusion.retry_after_s > 0


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"tenant_share": 0.0}, "tenant_share must be above 0"),
        ({"reserved_share": 0.5}, "reserved_share must be at least 0 and below 0.5"),
        ({"deadline_margin_ratio": -0.1}, "deadline_margin_ratio must not be negative"),
        ({"min_observations": 0}, "min_observations must be at least 1"),
        ({"probe_interval_s": 0.0}, "probe_interval_s must be positive"),
        ({"max_reservations": -1}, "max_reservations must not be negative"),
    ],
)
def test_settings_out_of_range_are_refused_by_name(changes: dict[str, float], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        AdmissionSettings(**changes)  # type: ignore[arg-type]
