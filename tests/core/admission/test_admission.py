import pytest

from serve_app.core.commands import Conclude
from serve_app.core.events import Finished
from serve_app.core.settings import AdmissionSettings
from serve_app.errors import Outcome
from serve_app.request import PriorityClass
from tests.builders import ManualDriver, concluded, dispatched, one_replica, only_conclusion, retry_after_s


def saturated(**changes: object) -> ManualDriver:
    """Return one replica whose engine queue is full."""
    driver = one_replica("s1", limits={"max_num_seqs": 1}, **changes)
    for number in range(3):
        driver.arrive(f"f{number}", tenant="filler")
    return driver


def settled() -> ManualDriver:
    """Return a steady backlog of eight requests, with one dispatch per second."""
    driver = saturated()
    for number in range(8):
        driver.arrive(f"w{number}", tenant="filler")
    for number in range(8, 60):
        driver.arrive(f"w{number}", tenant="filler")
        finish_oldest(driver)
    return driver


def finish_oldest(driver: ManualDriver) -> None:
    """Finish the oldest request a second later, so another is dispatched."""
    running = [scheduled for scheduled in driver.scheduler.requests.of_gateway("g1") if not scheduled.queued]
    oldest = min(running, key=lambda scheduled: scheduled.sequence)
    driver.report(waiting=3, after_s=1.0)
    assert len(dispatched(driver.feed(Finished(oldest.request.request_id, Outcome.COMPLETED)))) == 1


def test_a_deadline_that_cannot_be_met_is_rejected_on_arrival_with_a_retry_after() -> None:
    driver = settled()
    waiting = len(driver.scheduler.queue)
    assert waiting == 8
    rejection = only_conclusion(driver.arrive("r", tenant="filler", expires_at=driver.now + 4.0))
    assert rejection.outcome is Outcome.REJECTED_DEADLINE_UNMEETABLE
    assert "queue timeout is 4.0 s" in rejection.message
    # Eight seconds of work must drain to four, less the margin.
    assert rejection.retry_after_s == pytest.approx(waiting - 4.0 / 1.2, abs=2.0)
    assert driver.arrive("patient", tenant="filler", expires_at=driver.now + 20.0) == []


def test_a_request_that_returns_on_time_is_admitted_before_newcomers() -> None:
    driver = settled()
    rejected = driver.arrive("r1", prompt_tokens=33, tenant="filler", expires_at=driver.now + 4.0)
    until, number = driver.now + retry_after_s(rejected), 0
    while driver.now + 1.0 < until:
        finish_oldest(driver)
        number += 1
        newcomer = driver.arrive(f"n{number}", tenant="filler", expires_at=driver.now + 4.0)
        assert driver.now + retry_after_s(newcomer) > until
    driver.now = until
    assert driver.arrive("r1 again", prompt_tokens=33, tenant="filler", expires_at=driver.now + 4.0) == []


def test_a_full_queue_does_not_reject_a_request_that_fits_a_replica_at_once() -> None:
    driver = ManualDriver(max_waiting=1)
    driver.join("s1", "short", max_num_seqs=1)
    driver.join("l1", "long", max_model_len=4_000)
    for number in range(3):
        driver.arrive(f"long{number}", prompt_tokens=2_000)
    driver.arrive("waits", prompt_tokens=2_000)
    assert concluded(driver.arrive("long", prompt_tokens=2_000)) == [("long", "rejected_queue_full")]
    assert dispatched(driver.arrive("short", prompt_tokens=20)) == [("short", "s1")]


def test_a_heavy_tenant_is_rejected_while_a_light_one_is_admitted() -> None:
    driver = saturated(max_waiting=20)
    heavy = [driver.arrive(f"h{number}", tenant="heavy") for number in range(30)]
    assert sum(commands == [] for commands in heavy) == 15
    assert concluded(heavy[-1]) == [("h29", "rejected_queue_full")]
    assert "of this tenant" in only_conclusion(heavy[-1]).message
    assert driver.arrive("light", tenant="light") == []


def test_a_light_tenant_is_admitted_however_many_are_heavy() -> None:
    driver = saturated(max_waiting=40)
    for number in range(200):
        driver.arrive(f"h{number}", tenant=f"heavy{number % 3}")
    assert driver.arrive("light", tenant="light") == []


def test_retries_that_a_heavy_tenant_was_promised_leave_a_light_one_its_places() -> None:
    driver = saturated(max_waiting=20)
    for number in range(15):
        driver.arrive(f"first{number}", tenant="heavy")
    for number in range(60):
        # One request leaves each second, so that rejected ones get a time for their retry.
        finish_oldest(driver)
        for again in range(5):
            driver.arrive(f"h{number}-{again}", tenant="heavy", prompt_tokens=40 + again)
    assert len(driver.scheduler.admission.retry_reservations) > 20
    assert len(driver.scheduler.queue) < 18
    assert driver.arrive("light", tenant="light") == []


def test_the_last_queued_request_expires_however_small_the_share_of_its_tenant_is() -> None:
    driver = saturated(max_waiting=2, admission=AdmissionSettings(tenant_share=0.3))
    driver.arrive("r", expires_at=1.0)
    expired = driver.report(waiting=3, after_s=1.0)
    assert concluded(expired) == [("r", "expired")]
    assert retry_after_s(expired) <= 1.25


@pytest.mark.parametrize("own", [0, 1, 3])
def test_at_a_full_queue_retry_after_is_when_a_request_of_any_tenant_leaves(own: int) -> None:
    driver = saturated(max_waiting=20)
    for number in range(18 - own):
        driver.arrive(f"o{number}", tenant=f"other{number}")
    for number in range(60):
        # One request leaves each second.
        finish_oldest(driver)
        driver.arrive(f"n{number}", tenant=f"new{number}")
    for number in range(own):
        driver.arrive(f"own{number}", tenant="own")
    assert len(driver.scheduler.queue) == 18
    rejection = only_conclusion(driver.arrive("r", tenant="own"))
    assert rejection.retry_after_s == pytest.approx(1.0, abs=0.4)
    assert "the queue of m is full" in rejection.message


@pytest.mark.parametrize(
    ("priority", "places"),
    [(PriorityClass.BATCH, 16), (PriorityClass.DEFAULT, 18), (PriorityClass.INTERACTIVE, 20)],
)
def test_lower_classes_leave_a_share_of_the_queue_to_higher_ones(
    priority: PriorityClass, places: int
) -> None:
    driver = saturated(max_waiting=20, admission=AdmissionSettings(tenant_share=1.0))
    answers = [driver.arrive(f"r{number}", priority=priority) for number in range(25)]
    assert sum(commands == [] for commands in answers) == places


def test_an_expired_request_gets_a_retry_after() -> None:
    driver = settled()
    driver.arrive("r", tenant="filler", expires_at=driver.now + 20.0)
    commands = [command for _ in range(20) for command in driver.report(waiting=3, after_s=1.0)]
    expired = [command for command in commands if isinstance(command, Conclude)]
    assert concluded(expired) == [("r", "expired")]
    assert retry_after_s(expired) > 0
