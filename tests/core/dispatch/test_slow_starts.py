"""Requests whose first token is overdue."""

from typing import Any

from serve_app.core.commands import EngineSilent, Revoke
from serve_app.core.events import DispatchFailed, DispatchFailure, Finished, FirstToken, Woke
from serve_app.errors import Outcome
from serve_app.request import Usage
from tests.builders import ManualDriver, dispatched

SILENT: dict[str, Any] = {"received": None, "waiting": None, "running": None, "kv_usage_ratio": None}


def two_servers(**load: Any) -> ManualDriver:
    """Return two servers of one pool, without metrics unless `load` states some."""
    driver = ManualDriver()
    for name in ("s1", "s2"):
        driver.join(name, kv_tokens=None, max_num_seqs=100, stall_timeout_s=60.0)
        driver.report(name, **{**SILENT, **load})
    return driver


def revoked(driver: ManualDriver, after_s: float) -> list[tuple[str, str]]:
    """Let time pass in reports, and return what is revoked."""
    found = []
    for _ in range(round(2 * after_s)):
        for name in ("s1", "s2"):
            load = driver.scheduler.ledger[name].report
            assert load is not None
            values = {field: getattr(load, field) for field in SILENT}
            commands = driver.report(name, after_s=0.25, **values)
            found += [(each.request_id, each.replica_id) for each in commands if isinstance(each, Revoke)]
    return found


def serve(driver: ManualDriver, request_id: str, first_s: float = 0.1) -> str:
    """Serve a request whole, and return its replica."""
    ((_, replica_id),) = dispatched(driver.arrive(request_id))
    sent_at = driver.now
    assert revoked(driver, first_s - 0.5) == []
    driver.feed(FirstToken(request_id), after_s=sent_at + first_s - driver.now)
    driver.feed(Finished(request_id, Outcome.COMPLETED, Usage(prompt_tokens=40, output_tokens=10)))
    return replica_id


def put_back(driver: ManualDriver, request_id: str, replica_id: str) -> list[tuple[str, str]]:
    return dispatched(driver.feed(DispatchFailed(request_id, replica_id, DispatchFailure.REVOKED)))


def test_a_request_that_hangs_is_moved_to_another_server_once() -> None:
    driver = two_servers()
    ((_, hung),) = dispatched(driver.arrive("a"))
    other = "s2" if hung == "s1" else "s1"
    assert revoked(driver, 4.5) == []
    assert revoked(driver, 1.0) == [("a", hung)]
    assert put_back(driver, "a", hung) == [("a", other)]
    # Never back and forth: its second server may take as long as it wants.
    assert revoked(driver, 30.0) == []
    driver.feed(FirstToken("a"))
    assert driver.find("a").started


def test_a_server_without_any_sign_of_life_is_named_and_gets_nothing_more() -> None:
    driver = two_servers()
    ((_, hung),) = dispatched(driver.arrive("a"))
    commands = []
    for _ in range(60):
        for name in ("s1", "s2"):
            commands += driver.report(name, after_s=0.1, **SILENT)
    (silent,) = [each for each in commands if isinstance(each, EngineSilent)]
    assert silent.replica_id == hung
    assert silent.silent_s >= 5.0
    assert {serve(driver, f"b{n}") for n in range(6)} == {"s2" if hung == "s1" else "s1"}


def test_the_limit_follows_the_slowest_recent_first_token() -> None:
    driver = two_servers()
    for number in range(20):
        serve(driver, f"r{number}", first_s=4.0)
    ((_, slow),) = dispatched(driver.arrive("a"))
    assert revoked(driver, 11.5) == []
    assert revoked(driver, 1.5) == [("a", slow)]


def test_without_another_server_that_accepts_it_a_request_stays() -> None:
    driver = two_servers()
    driver.report("s2", **SILENT, draining=True)
    driver.arrive("a")
    for _ in range(100):
        commands = driver.report("s1", after_s=0.2, **SILENT)
        assert not any(isinstance(each, Revoke) for each in commands)


def test_an_engine_that_reports_its_queue_and_computes_keeps_its_requests() -> None:
    driver = two_servers(received=0, waiting=2, running=5, kv_usage_ratio=0.5)
    driver.arrive("a")
    for _ in range(100):
        for name in ("s1", "s2"):
            load = {"received": 1, "waiting": 2, "running": 5, "kv_usage_ratio": 0.5, "computes": True}
            commands = driver.report(name, after_s=0.1, **load)
            assert not any(isinstance(each, Revoke) for each in commands)


def test_moves_are_a_small_share_of_the_work() -> None:
    driver = two_servers()
    for number in range(40):
        driver.arrive(f"r{number}")
    # Twenty of forty hang. The first few are moved, and then one for each twenty dispatches.
    moved = revoked(driver, 60.0)
    assert len(moved) == 8
    for request_id, replica_id in moved:
        put_back(driver, request_id, replica_id)
    assert len(revoked(driver, 60.0)) == 0


def test_a_wake_up_finds_an_overdue_start_without_reports() -> None:
    driver = two_servers()
    driver.arrive("a")
    wake_at = driver.scheduler.next_wakeup()
    assert wake_at is not None
    driver.report("s1", after_s=2.0, **SILENT)
    driver.report("s2", after_s=2.0, **SILENT)
    at = driver.scheduler.next_wakeup()
    assert at is not None
    driver.now = max(driver.now, 5.0)
    commands = driver.feed(Woke(), after_s=0.0)
    assert [each.request_id for each in commands if isinstance(each, Revoke)] == ["a"]
