"""How long the requests of a tenant wait, by its use of its share, in random histories of one busy engine."""

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from serve_app.core.commands import Command
from serve_app.core.dispatch.backpressure import BackpressureSettings
from serve_app.core.dispatch.promotion import PromotionSettings
from serve_app.core.events import Event, Finished, FirstToken
from serve_app.core.isolation import IsolationSettings
from serve_app.errors import Outcome
from serve_app.request import PriorityClass, Usage
from tests.builders import ONE_POOL, ManualDriver, dispatched

TOKENS_PER_S, OUTPUT = 1_000.0, 10
LARGEST_S = (4_000 + 2 * OUTPUT) / TOKENS_PER_S
BOUND_S, PROMOTED_SHARE = 5.0, 0.25
LIGHT = ("a", "b", "c")


def service_s(prompt_tokens: int) -> float:
    return (prompt_tokens + 2 * OUTPUT) / TOKENS_PER_S


@dataclass
class Arrival:
    at: float
    tenant: str
    prompt_tokens: int
    priority: PriorityClass = PriorityClass.DEFAULT
    number: int = -1
    sent_at: float = math.inf

    @property
    def name(self) -> str:
        return f"{self.tenant} {self.number}"


class SerialEngine(ManualDriver):
    """An engine that serves one request at a time, for a known duration.

    Attributes:
        order: requests in the order of dispatch.
    """

    def __init__(
        self, arrivals: Sequence[Arrival], promoted_share: float = PROMOTED_SHARE, **changes: Any
    ) -> None:
        super().__init__(
            policy="ewsjf",
            routing=ONE_POOL,
            isolation=IsolationSettings(max_long_prefills=0),
            backpressure=BackpressureSettings(target_waiting=1, lag_factor=0.0),
            promotion=PromotionSettings(default_s=BOUND_S, promoted_share=promoted_share),
            **changes,
        )
        self.arrivals = arrivals
        self.order: list[Arrival] = []
        self.by_name: dict[str, Arrival] = {}
        self.join("e", "only", max_model_len=8_192, kv_tokens=10_000_000, max_num_seqs=64)
        self.ends_at = math.inf

    def feed(self, event: Event, *, after_s: float = 0.0) -> list[Command]:
        commands = super().feed(event, after_s=after_s)
        for name, _ in dispatched(commands):
            one = self.by_name[name]
            one.sent_at, self.ends_at = self.now, self.now + service_s(one.prompt_tokens)
            self.order.append(one)
        return commands

    def run(self) -> None:
        coming = sorted(self.arrivals, key=lambda one: one.at)
        while coming or self.ends_at < math.inf:
            at = coming[0].at if coming else math.inf
            self.now = min(at, self.ends_at)
            self.report("e")
            if at <= self.ends_at:
                one = coming.pop(0)
                one.number = len(self.by_name)
                self.by_name[one.name] = one
                self.arrive(
                    one.name,
                    prompt_tokens=one.prompt_tokens,
                    max_output_tokens=OUTPUT,
                    tenant=one.tenant,
                    priority=one.priority,
                )
                continue
            ended, self.ends_at = self.order[-1], math.inf
            self.feed(FirstToken(ended.name))
            usage = Usage(prompt_tokens=ended.prompt_tokens, output_tokens=OUTPUT)
            self.feed(Finished(ended.name, Outcome.COMPLETED, usage))
        assert len(self.order) == len(self.arrivals)


lengths = st.integers(50, 4_000)
heavy = st.lists(lengths, min_size=20, max_size=40).map(
    lambda prompts: [Arrival(0.0, "heavy", tokens) for tokens in prompts]
)
light = st.lists(
    st.builds(Arrival, at=st.floats(0.5, 60.0), tenant=st.sampled_from(LIGHT), prompt_tokens=lengths),
    min_size=1,
    max_size=15,
)


bursts = st.lists(
    st.tuples(
        st.floats(0.5, 60.0), st.sampled_from(LIGHT), st.lists(st.integers(50, 1_000), min_size=2, max_size=8)
    ),
    min_size=1,
    max_size=6,
).map(lambda each: [Arrival(at, tenant, tokens) for at, tenant, prompts in each for tokens in prompts])


@settings(max_examples=60, deadline=None)
@given(heavy, light | bursts)
def test_a_tenant_that_uses_less_than_its_share_waits_as_if_alone_on_its_share_plus_one_request_of_each(
    heavy: list[Arrival], light: list[Arrival]
) -> None:
    # Every request of the heavy tenant is promoted once it is beyond its bound.
    SerialEngine([*heavy, *light], promoted_share=1.0).run()
    tenants = len(LIGHT) + 1
    ends_at: defaultdict[str, float] = defaultdict(float)
    for one in sorted(light, key=lambda one: one.at):
        # With the engine's share alone, it would be complete at this time.
        alone_at = ends_at[one.tenant] = max(one.at, ends_at[one.tenant]) + tenants * service_s(
            one.prompt_tokens
        )
        assert one.sent_at <= alone_at + tenants * LARGEST_S


@settings(max_examples=60, deadline=None)
@given(heavy, light)
def test_the_oldest_request_of_any_tenant_is_dispatched_within_its_bound(
    heavy: list[Arrival], light: list[Arrival]
) -> None:
    engine = SerialEngine([*heavy, *light])
    engine.run()
    for one in engine.arrivals:
        own = [each for each in engine.order if each.tenant == one.tenant]
        starved_at = one.at + BOUND_S
        before = [each for each in own if starved_at < each.sent_at < one.sent_at]
        older = [each for each in before if each.number < one.number]
        assert len(before) <= (len(older) + 1) / PROMOTED_SHARE
