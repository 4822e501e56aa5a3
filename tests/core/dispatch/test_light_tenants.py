"""Long prompts of light tenants beside the old backlog of a heavy one."""

from serve_app.core.commands import Command
from serve_app.core.dispatch.backpressure import BackpressureSettings
from serve_app.core.dispatch.promotion import PromotionSettings
from serve_app.core.events import Event, Finished, FirstToken
from serve_app.core.isolation import IsolationSettings
from serve_app.errors import Outcome
from tests.builders import ONE_POOL, ManualDriver, dispatched

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
