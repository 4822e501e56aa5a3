"""Light tenants beside heavy ones that fill a replica's KV cache or its queue."""

from typing import Any

import pytest

from serve_app.core.commands import Command
from serve_app.core.dispatch.backpressure import BackpressureSettings
from serve_app.core.dispatch.promotion import PromotionSettings
from serve_app.core.events import Event, Finished, FirstToken
from serve_app.core.isolation import IsolationSettings
from serve_app.core.queueing.fairness import FairnessMode, FairnessSettings
from serve_app.errors import Outcome
from serve_app.request import Usage
from tests.builders import ONE_POOL, ManualDriver, dispatched

KV = 10_000


class Shared(ManualDriver):
    """One replica with heavy tenants, each request of which takes a twentieth of the cache."""

    def __init__(self, *, policy: str = "ewsjf", **changes: object) -> None:
        super().__init__(policy=policy, routing=ONE_POOL, **changes)
        self.number = 0
        self.running: list[str] = []
        self.join("e", "only", max_model_len=KV, kv_tokens=KV, max_num_seqs=256)

    def feed(self, event: Event, *, after_s: float = 0.0) -> list[Command]:
        commands = super().feed(event, after_s=after_s)
        for request_id, _ in dispatched(commands):
            self.running.append(request_id)
            commands += self.feed(FirstToken(request_id))
        return commands

    def send(self, tenant: str, prompt_tokens: int = 470) -> str:
        self.number += 1
        name = f"{tenant} {self.number}"
        self.arrive(name, prompt_tokens=prompt_tokens, max_output_tokens=10, tenant=tenant)
        return name

    def end(self, request_id: str) -> None:
        self.running.remove(request_id)
        self.feed(Finished(request_id, Outcome.COMPLETED))

    def light_traffic(self, requests: int = 100) -> None:
        """Let a tenant send a few requests one after the other while another fills the cache."""
        for _ in range(requests):
            running = [self.send("heavy") for _ in range(8)]
            running.append(self.send("light", 190))
            for request_id in running:
                self.end(request_id)

    @property
    def free(self) -> int:
        return self.scheduler.ledger["e"].free_tokens

    def is_waiting(self, request_id: str) -> bool:
        return self.find(request_id).queued


def test_a_heavy_tenant_leaves_room_that_a_light_one_gets_at_once() -> None:
    shared = Shared()
    shared.light_traffic()
    waiting = [each for each in (shared.send("heavy") for _ in range(30)) if shared.is_waiting(each)]
    assert waiting
    assert "its tenant holds more than its share" in shared.wait_reasons(waiting[0])
    assert 200 <= shared.free < 470 + 1_000
    assert not shared.is_waiting(shared.send("light", 190))


def test_a_heavy_tenant_leaves_room_even_if_nothing_else_is_queued() -> None:
    shared = Shared()
    shared.light_traffic()
    *running, last = [shared.send("heavy") for _ in range(20)]
    assert not any(map(shared.is_waiting, running))
    assert shared.free > (KV - shared.free) / len(running)
    assert shared.is_waiting(last)
    assert "its tenant holds more than its share" in shared.wait_reasons(last)


def test_alike_tenants_fill_the_cache() -> None:
    shared = Shared()
    for tenant in 5 * "abcd":
        shared.send(tenant)
    for _ in range(60):
        for tenant in "abcd":
            shared.send(tenant)
        for request_id in [each for each in shared.running if each[0] in "abcd"][:4]:
            shared.end(request_id)
    assert shared.free < 500


def test_a_large_request_of_a_heavy_tenant_still_fits_an_idle_replica() -> None:
    shared = Shared()
    shared.light_traffic()
    shared.send("heavy")
    huge = shared.send("heavy", KV - 20)
    assert shared.is_waiting(huge)
    for request_id in list(shared.running):
        if request_id != huge:
            shared.end(request_id)
    assert not shared.is_waiting(huge)


@pytest.mark.parametrize(
    ("changes", "light_requests", "idle_s"),
    [
        # No light tenant, or one that has left.
        ({}, 0, 0.0),
        ({}, 100, 120.0),
        # Shares that the heavy tenant does not exceed, or that nothing depends on.
        ({"fairness": FairnessSettings(weights={"heavy": 99.0})}, 100, 0.0),
        ({"fairness": FairnessSettings(mode=FairnessMode.OFF)}, 100, 0.0),
        ({"policy": "fcfs"}, 100, 0.0),
    ],
)
def test_nothing_is_kept_where_no_tenant_is_light(
    changes: dict[str, Any], light_requests: int, idle_s: float
) -> None:
    shared = Shared(**changes)
    shared.light_traffic(light_requests)
    shared.report("e", after_s=idle_s)
    for _ in range(30):
        shared.send("heavy")
    assert shared.free < 500


def test_requests_that_need_no_tokens_are_counted() -> None:
    shared = Shared()
    for number in range(2):
        shared.arrive(f"empty {number}", prompt_tokens=0, max_output_tokens=0)
    for request_id in list(shared.running):
        shared.end(request_id)
    assert shared.free == KV


def test_answers_without_a_limit_fill_the_cache_after_others_were_cut_off() -> None:
    shared = Shared()
    for number in range(60):
        shared.arrive(f"cut {number}", prompt_tokens=10, max_output_tokens=100)
        shared.running.remove(f"cut {number}")
        usage = Usage(prompt_tokens=10, output_tokens=100)
        shared.feed(Finished(f"cut {number}", Outcome.COMPLETED, usage))
    for number in range(30):
        shared.arrive(f"open {number}", prompt_tokens=900, max_output_tokens=None)
    assert 0 <= shared.free < 900 + 1_024


def test_a_light_tenant_does_not_wait_for_a_heavy_one_that_is_behind_another() -> None:
    shared = Shared()
    shared.light_traffic()
    for tenant in 15 * ("heavy", "other"):
        shared.send(tenant)
    for request_id in [each for each in shared.running if each.startswith("other")]:
        shared.end(request_id)
        light = shared.send("light", 190)
        assert not shared.is_waiting(light)
        shared.end(light)


# -- long prompts of light tenants beside the old backlog of a heavy one ----------------------------------

BOUND_S = 60.0


class Backlog(ManualDriver):
    """One replica with one long prefill at a time, and a backlog of long prompts beyond the starvation bound.

    Attributes:
        order: requests in the order of dispatch.
    """

    def __init__(self) -> None:
        super().__init__(
            policy="ewsjf",
            routing=ONE_POOL,
            isolation=IsolationSettings(max_long_prefills=1, no_short_s=1e9),
            backpressure=BackpressureSettings(target_waiting=8, lag_factor=0.0),
            promotion=PromotionSettings(default_s=BOUND_S),
        )
        self.order: list[str] = []
        self.number = 0
        self.join("r1", "only", max_model_len=8_192, kv_tokens=1_000_000, max_num_seqs=200)
        for _ in range(12):
            self.send_long("heavy")
        self.report("r1", after_s=BOUND_S + 1.0)

    def feed(self, event: Event, *, after_s: float = 0.0) -> list[Command]:
        commands = super().feed(event, after_s=after_s)
        self.order += [name for name, _ in dispatched(commands)]
        return commands

    def send_long(self, tenant: str) -> str:
        self.number += 1
        name = f"{tenant} {self.number}"
        self.arrive(name, prompt_tokens=2_000, max_output_tokens=10, tenant=tenant)
        return name

    def serve_short(self, tenant: str) -> None:
        self.number += 1
        name = f"short {self.number}"
        self.arrive(name, prompt_tokens=200, max_output_tokens=10, tenant=tenant)
        assert name in self.order
        self.feed(FirstToken(name))
        self.feed(Finished(name, Outcome.COMPLETED))


def test_a_light_tenant_passes_the_promoted_requests_of_a_heavy_one() -> None:
    driver = Backlog()
    assert driver.order == ["heavy 1"]
    light = driver.send_long("light")
    driver.feed(FirstToken("heavy 1"))
    assert driver.order[1:] == [light]
    driver.feed(FirstToken(light))
    assert driver.order[2:] == ["heavy 2"]


def test_several_light_tenants_do_not_wait_for_the_long_prefill_of_a_heavy_one() -> None:
    driver = Backlog()
    lights = {driver.send_long("a"), driver.send_long("b")}
    assert driver.order == ["heavy 1"]
    for _ in range(60):
        driver.serve_short("heavy")
    assert lights < set(driver.order)
    assert "heavy 2" not in driver.order


def test_similar_tenants_are_owed_no_long_prefill_beside_those_in_flight() -> None:
    driver = Backlog()
    for _ in range(12):
        driver.send_long("similar")
    for _ in range(4):
        driver.serve_short("heavy")
        driver.serve_short("similar")
    assert [name for name in driver.order if not name.startswith("short")] == ["heavy 1"]
