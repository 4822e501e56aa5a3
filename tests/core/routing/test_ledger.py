"""Replica ledger: queries over replicas, replicas that leave, and learned contexts."""

from typing import Any

import pytest

from serve_app.core.commands import Command, Conclude, ContextLearned
from serve_app.core.events import DispatchFailed, DispatchFailure, Finished
from serve_app.core.routing.ledger import ReplicaLedger
from serve_app.core.routing.pools import RoutingSettings
from serve_app.core.routing.replica import UNREPORTED_CONTEXT
from serve_app.core.routing.replica_state import ReplicaState, Running
from serve_app.errors import Outcome
from serve_app.request import PromptShape, Usage
from tests.builders import ManualDriver, concluded, dispatched, report, request, spec
from tests.core.routing.test_prefix import NoBackpressure


def ledger(*replica_ids: str, pool: str = "short") -> ReplicaLedger:
    made = ReplicaLedger(backpressure=NoBackpressure(), report_limit_s=10)
    for replica_id in replica_ids:
        made.join(spec(replica_id, pool), 0.0)
        made.report(replica_id, report(), 0.0)
    return made


def test_the_freest_usable_replica_of_a_pool_is_found_and_ties_go_to_the_first() -> None:
    made = ledger("a", "b", "c")
    made.join(spec("other", "long", kv_tokens=10**6), 0.0)
    made.report("other", report(), 0.0)
    assert made.most_free("short") is made["a"]
    made.hold(Running(made["a"], 10), 0.0)
    assert made.most_free("short") is made["b"]
    made.hold(Running(made["b"], 20), 0.0)
    made.suspend(made["c"], 0.0)
    assert made.most_free("short") is made["a"]
    assert made.most_free("nowhere") is None


def test_the_loss_of_a_lost_or_unknown_replica_is_ignored() -> None:
    made = ledger("a", "b")
    running = Running(made["a"], 10)
    made.hold(running, 0.0)
    made.lose("a", 0.0)
    made.lose("a", 0.0)
    made.lose("unknown", 0.0)
    assert made.connected_count == 1
    assert made["a"].joined is False
    made.release(running, 3.0)
    assert made.get("a") is None


def test_a_lost_replica_has_no_report_to_expire() -> None:
    made = ledger("a")
    assert made.next_report_expiry() == 10.0
    made.lose("a", 0.0)
    assert made.next_report_expiry() is None
    assert made.expire_reports(100.0) == []
    # A replica that joined and never reported can leave, too.
    silent = ReplicaLedger(backpressure=NoBackpressure(), report_limit_s=10)
    silent.join(spec("s"), 0.0)
    silent.lose("s", 0.0)
    assert silent.connected_count == 0


def test_whether_a_pool_is_alive_costs_the_same_in_a_large_fleet(monkeypatch: pytest.MonkeyPatch) -> None:
    made = ledger(*(f"s{number}" for number in range(200)))
    for number in range(200):
        made.join(spec(f"l{number}", "long"), 0.0)
    # Only the last replica of each pool is alive: finding it must examine all others.
    made.report("l199", report(), 0.0)
    for number in range(199):
        made.lose(f"s{number}", 0.0)
    assert made.has_alive("short")
    assert made.has_alive("long")
    looks = 0
    is_alive: property = vars(ReplicaState)["is_alive"]

    def counted(state: ReplicaState) -> bool:
        nonlocal looks
        looks += 1
        return bool(is_alive.__get__(state))

    monkeypatch.setattr(ReplicaState, "is_alive", property(counted))
    for _report in range(100):
        assert made.has_alive("short")
        assert made.has_alive("long")
    assert looks <= 400


def test_the_smallest_context_limit_of_a_pool_follows_its_replicas() -> None:
    made = ledger()
    made.join(spec("a", "short", max_model_len=4_000), 0.0)
    made.join(spec("b", "short", max_model_len=2_000), 0.0)
    assert (made.context_limit("short"), made.contexts.changes) == (2_000, 2)
    made.join(spec("c", "short", max_model_len=9_000), 0.0)
    assert made.contexts.changes == 2
    made.lose("b", 0.0)
    assert made.context_limit("short") == 4_000
    made.join(spec("a", "long", max_model_len=4_000), 0.0)
    assert (made.context_limit("short"), made.context_limit("long")) == (9_000, 4_000)
    assert [state.spec.replica_id for state in made.of_pool("long")] == ["a"]
    made.lose("c", 0.0)
    assert made.context_limit("short") is None


def test_the_smallest_kv_cache_of_a_pool_follows_its_replicas() -> None:
    made = ledger()
    assert made.smallest_kv_budget("short") == 0
    made.join(spec("a", "short", kv_tokens=50_000, max_model_len=100), 0.0)
    made.join(spec("b", "short", kv_tokens=20_000, max_model_len=100), 0.0)
    assert made.smallest_kv_budget("short") == 20_000
    # It restarts with a larger cache.
    made.join(spec("b", "short", kv_tokens=90_000, max_model_len=100), 1.0)
    assert made.smallest_kv_budget("short") == 50_000
    made.join(spec("a", "long", kv_tokens=50_000, max_model_len=100), 2.0)
    assert (made.smallest_kv_budget("short"), made.smallest_kv_budget("long")) == (90_000, 50_000)
    made.lose("b", 0.0)
    assert made.smallest_kv_budget("short") == 0


# -- context limits learned from rejections, for pools that report none -----------------------------------


def fleet(short: int = UNREPORTED_CONTEXT, long: int = 16_000) -> ManualDriver:
    driver = ManualDriver(routing=RoutingSettings(pools=("short", "long"), b_short_tokens=16_000))
    driver.join("s1", "short", max_model_len=short, kv_tokens=None)
    driver.join("l1", "long", max_model_len=long, kv_tokens=None)
    return driver


def arrive(driver: ManualDriver, request_id: str, prompt_tokens: int, **fields: Any) -> str:
    """Return the replica that gets the request."""
    ((_, replica_id),) = dispatched(driver.arrive(request_id, prompt_tokens=prompt_tokens, **fields))
    return replica_id


def reject(driver: ManualDriver, request_id: str, stated: int | None = None) -> list[Command]:
    replica_id = driver.find(request_id).replica_id
    assert replica_id is not None
    failed = DispatchFailed(request_id, replica_id, DispatchFailure.TOO_LONG, "too long", stated)
    return driver.feed(failed)


def complete(driver: ManualDriver, request_id: str, prompt_tokens: int) -> list[Command]:
    return driver.feed(
        Finished(request_id, Outcome.COMPLETED, Usage(prompt_tokens=prompt_tokens, output_tokens=10))
    )


def learned(commands: list[Command]) -> list[tuple[str, int | None]]:
    return [(each.replica_id, each.context_tokens) for each in commands if isinstance(each, ContextLearned)]


def test_a_stated_limit_routes_from_then_on_and_is_reported_once() -> None:
    driver = fleet()
    assert arrive(driver, "a", 5_000) == "s1"
    commands = reject(driver, "a", 4_096)
    assert learned(commands) == [("s1", 4_096)]
    assert dispatched(commands) == [("a", "l1")]
    assert learned(complete(driver, "a", 5_000)) == []
    assert arrive(driver, "b", 5_000) == "l1"
    assert arrive(driver, "c", 4_000) == "s1"
    assert learned(complete(driver, "c", 4_000)) == []


def test_without_a_number_the_request_still_finds_the_longer_pool_and_its_length_is_the_bound() -> None:
    driver = fleet()
    arrive(driver, "a", 5_000)
    commands = reject(driver, "a")
    assert learned(commands) == [("s1", 5_009)]
    assert dispatched(commands) == [("a", "l1")]
    assert learned(complete(driver, "a", 5_000)) == []
    assert arrive(driver, "b", 5_000) == "l1"
    assert arrive(driver, "c", 4_900) == "s1"


def test_a_count_from_the_longer_pool_corrects_an_estimate() -> None:
    driver = fleet()
    # Numbers have far fewer bytes per token than assumed: 4,000 bytes are 3,900 tokens.
    shape = PromptShape(text_bytes=4_000)
    assert arrive(driver, "a", 0, shape=shape) == "s1"
    ((_, estimated),) = learned(reject(driver, "a"))
    assert estimated is not None
    assert estimated < 2_000
    assert learned(complete(driver, "a", 3_900)) == [("s1", 3_909)]


def test_a_reported_limit_is_never_changed() -> None:
    driver = fleet(short=8_000)
    arrive(driver, "a", 5_000)
    commands = reject(driver, "a", 4_096)
    assert learned(commands) == []
    assert driver.scheduler.ledger["s1"].context_limit == 8_000
    assert dispatched(commands) == [("a", "l1")]
    assert arrive(driver, "b", 5_000) == "s1"


def test_a_learned_limit_rejects_no_request() -> None:
    driver = ManualDriver(routing=RoutingSettings(pools=("only",)))
    driver.join("s1", "only", max_model_len=UNREPORTED_CONTEXT, kv_tokens=None)
    arrive(driver, "a", 5_000)
    commands = reject(driver, "a", 4_096)
    assert learned(commands) == [("s1", 4_096)]
    (end,) = (each.conclusion for each in commands if isinstance(each, Conclude))
    assert (end.outcome, end.message) == (Outcome.REJECTED_TOO_LONG, "too long")
    # The learned limit may be too low: the engine receives a longer request and serves it.
    assert arrive(driver, "b", 6_000) == "s1"
    assert learned(complete(driver, "b", 6_000)) == [("s1", None)]


def test_two_pools_without_reported_limits_are_tried_one_after_the_other() -> None:
    driver = fleet(long=UNREPORTED_CONTEXT)
    assert arrive(driver, "a", 5_000) == "s1"
    assert dispatched(reject(driver, "a", 4_096)) == [("a", "l1")]
    commands = reject(driver, "a", 4_608)
    assert concluded(commands) == [("a", "rejected_too_long")]
    assert driver.scheduler.router.route(
        request(prompt_tokens=4_500), driver.scheduler.estimator.estimate(request(prompt_tokens=4_500))
    ) == ("long",)


def test_it_persists_until_the_replica_joins_again() -> None:
    driver = fleet()
    arrive(driver, "a", 5_000)
    reject(driver, "a", 4_096)
    assert driver.scheduler.ledger.context_limit("short") == 4_096
    assert driver.scheduler.ledger.contexts.reported("short") == UNREPORTED_CONTEXT
    driver.join("s1", "short", max_model_len=UNREPORTED_CONTEXT, kv_tokens=None)
    assert driver.scheduler.ledger.context_limit("short") == UNREPORTED_CONTEXT


def test_a_known_cache_of_an_engine_without_a_reported_context_is_a_limit() -> None:
    driver = ManualDriver(routing=RoutingSettings(pools=("only",)))
    driver.join("s1", "only", max_model_len=UNREPORTED_CONTEXT, kv_tokens=10_000)
    assert driver.scheduler.ledger["s1"].kv_budget <= 10_000


def test_loading_an_adapter_does_not_reset_what_was_learned_about_its_engine() -> None:
    driver = fleet()
    limits = {"max_model_len": UNREPORTED_CONTEXT, "kv_tokens": None, "max_num_seqs": None}
    driver.join("s1", "short", **limits)
    arrive(driver, "a", 5_000)
    reject(driver, "a", 4_096)
    limit = driver.scheduler.ledger["s1"].learned.limit
    driver.join("s1", "short", **limits, adapters=("sql",))
    state = driver.scheduler.ledger["s1"]
    assert state.spec.adapters == ("sql",)
    assert state.learned.limit is limit
    assert driver.scheduler.ledger.context_limit("short") == 4_096
