"""Settings derived from an application's models, and settings that contradict each other."""

from collections.abc import Mapping
from typing import Any, ClassVar

import pytest

from serve_app.core.settings_base import settings as settings_class
from serve_app.engines.emulated.engine import EmulatedEngineSettings
from serve_app.engines.engine import Engine
from serve_app.settings.application import EngineSettings
from tests.settings.builders import emulated, model, parse, pool, rejection


def test_a_component_inherits_the_models_settings() -> None:
    settings = parse(model(aliases=["gpt"]))
    scheduler = settings.models[0].scheduler
    assert (scheduler.model, scheduler.aliases) == ("demo", ("gpt",))
    assert scheduler.routing.pools == ("short", "long")
    assert [(served.name, served.max_model_len) for served in settings.gateway.models] == [
        ("demo", 8_192),
        ("gpt", 8_192),
    ]
    engine = settings.models[0].pools[0].engine.emulated
    assert engine is not None
    assert engine.served_model_names == ("demo", "gpt")


def test_a_default_token_budget_fits_the_first_pool() -> None:
    assert parse().models[0].scheduler.routing.b_short_tokens == 2_048
    chosen = parse(model(scheduler={"routing": {"b_short_tokens": 1_000}}))
    assert chosen.models[0].scheduler.routing.b_short_tokens == 1_000


def test_an_emulated_pool_has_the_context_of_its_profile() -> None:
    pools = [pool("short"), {"name": "long", "engine": emulated(profile="llama31-8b-rtx4090-tp1")}]
    settings = parse(model(pools=pools))
    assert settings.models[0].pools[1].engine.max_model_len == 16_384
    assert settings.gateway.models[0].max_model_len == 16_384


def test_one_pool_is_enough() -> None:
    settings = parse(model(pools=[pool("long")]))
    assert settings.models[0].scheduler.routing.pools == ("long",)
    assert settings.models[0].scheduler.routing.b_short_tokens == 8_192


def test_a_vllm_engine_answers_under_the_names_of_its_model() -> None:
    vllm = {"vllm": {"model": "/weights", "args": {"max_model_len": 4_096}}}
    engine = parse(model(pools=[{"name": "long", "engine": vllm}])).models[0].pools[0].engine
    assert engine.vllm is not None
    assert engine.vllm.served_model_names == ("demo",)
    assert engine.max_model_len == 4_096


def test_pools_in_the_wrong_order_are_rejected() -> None:
    message = rejection(model(pools=[pool("long"), pool("short")]))
    assert "pools must be listed by increasing context" in message
    assert "8,192" in message


def test_a_token_budget_that_the_short_pool_cannot_hold_is_rejected() -> None:
    message = rejection(model(scheduler={"routing": {"b_short_tokens": 4_000}}))
    assert "b_short_tokens of 4,000 exceeds the context of pool short (max_model_len 2,048)" in message


def priority_model(*engines: dict[str, Any]) -> dict[str, Any]:
    pools = [
        {"name": name, "engine": engine} for name, engine in zip(("short", "long"), engines, strict=True)
    ]
    return model(pools=pools, scheduler={"engine_priority": {"enabled": True}})


@pytest.mark.parametrize("policy", ["hrrn", "lifo"])
def test_a_policy_for_comparisons_is_rejected_with_the_choices_and_the_command_that_plays_it(
    policy: str,
) -> None:
    assert rejection(model(scheduler={"policy": policy})) == (
        "models[0].scheduler.policy must be one of ewsjf, fcfs, fcfs-isolated, sjf-aging, "
        f"got {policy!r}; `simulate --policy` plays further policies, for comparisons"
    )


def test_engine_priority_wants_engines_that_schedule_by_it() -> None:
    ready = emulated(max_model_len=2_048, advanced={"scheduling_policy": "priority"})
    args = {"max_model_len": 4_096}
    assert rejection(priority_model(ready, emulated(max_model_len=8_192))) == (
        "models[0].scheduler.engine_priority is enabled, but the engine of pool long does not schedule by "
        "priority: set models[0].pools[1].engine.emulated.advanced.scheduling_policy to priority"
    )
    message = rejection(priority_model(ready, {"vllm": {"model": "/weights", "args": args}}))
    assert "set models[0].pools[1].engine.vllm.args.scheduling_policy to priority" in message
    message = rejection(
        priority_model(ready, {"vllm": {"model": "/w", "args": {**args, "scheduling_policy": "fcfs"}}})
    )
    assert "pool long does not schedule by priority" in message


def test_engine_priority_takes_vllm_engines_that_have_it_and_remote_ones_on_trust() -> None:
    args = {"max_model_len": 4_096, "scheduling_policy": "priority"}
    vllm = {"vllm": {"model": "/weights", "args": args}}
    remote = {"remote": {"endpoints": ["http://engine:8000"]}}
    enabled = parse(priority_model(vllm, remote)).models[0]
    assert enabled.scheduler.engine_priority.enabled
    assert [pool.engine.chosen.schedules_by_priority for pool in enabled.pools] == [True, None]


def test_engines_may_schedule_by_priority_without_receiving_one() -> None:
    settings = parse(model(pools=[pool("long", engine=emulated(advanced={"scheduling_policy": "priority"}))]))
    assert not settings.models[0].scheduler.engine_priority.enabled


def tiers(*changes: dict[str, Any]) -> list[dict[str, Any]]:
    """Return pools of 2,048, 8,192 and 16,384 tokens."""
    pools = [
        {"name": name, "engine": emulated(profile="llama31-8b-rtx4090-tp1", max_model_len=limit)}
        for name, limit in (("small", 2_048), ("middle", 8_192), ("large", 16_384))
    ]
    return [each | change for each, change in zip(pools, changes or ({},) * 3, strict=True)]


def test_a_model_may_have_any_number_of_pools() -> None:
    routing = parse(model(pools=tiers())).models[0].scheduler.routing
    assert (routing.pools, routing.b_short_tokens) == (("small", "middle", "large"), 2_048)
    assert (routing.boundaries_tokens, routing.costs) == ((), ())
    changed = tiers({}, {"advanced": {"boundary_tokens": 4_096, "cost": 2.0}}, {"advanced": {"cost": 3.5}})
    routing = parse(model(pools=changed)).models[0].scheduler.routing
    assert (routing.boundaries_tokens, routing.costs) == ((4_096,), (1.0, 2.0, 3.5))


def test_pools_may_have_the_same_context_and_then_the_first_is_home_of_all_that_it_holds() -> None:
    pools = [{**pool("long"), "name": "cheap"}, pool("long")]
    routing = parse(model(pools=pools)).models[0].scheduler.routing
    assert routing.b_short_tokens == 8_192


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            ({"advanced": {"boundary_tokens": 1_024}}, {}, {}),
            "pools[0].boundary_tokens: set scheduler.routing.b_short_tokens",
        ),
        (
            ({}, {}, {"advanced": {"boundary_tokens": 1_024}}),
            "pools[2].boundary_tokens: remove it, because the last pool is the home pool",
        ),
        (
            ({}, {"advanced": {"boundary_tokens": 9_000}}, {}),
            "pools[1].boundary_tokens of 9,000 exceeds the context of pool middle (max_model_len 8,192)",
        ),
        (({}, {"advanced": {"boundary_tokens": 1_000}}, {}), "the boundaries between pools must increase"),
        (({}, {"advanced": {"cost": 0}}, {}), "cost must be a positive number, got 0"),
    ],
)
def test_boundaries_and_costs_that_do_not_go_together_are_rejected(
    changes: tuple[dict[str, Any], ...], message: str
) -> None:
    assert message in rejection(model(pools=tiers(*changes)))


def test_every_pool_follows_those_of_shorter_contexts() -> None:
    small, middle, large = tiers()
    message = rejection(model(pools=[small, large, middle]))
    assert "max_model_len 16,384 in large before 8,192 in middle" in message


def test_two_models_with_one_name_are_rejected() -> None:
    assert "demo" in rejection(model(), model())
    assert "gpt" in rejection(model(aliases=["gpt"]), model(name="other", aliases=["gpt"]))


@settings_class
class MinimalEngineSettings:
    """Settings of a new kind of hosted engine."""

    PRIORITY_SETTING: ClassVar[str] = "order"

    served_model_names: tuple[str, ...] | None = None
    context: int = 512

    @property
    def context_limit(self) -> int | None:
        return self.context

    @property
    def schedules_by_priority(self) -> bool | None:
        return False

    def batch_limits(self) -> Mapping[str, Any]:
        return {"max_num_seqs": 7}

    @property
    def simulated_profile(self) -> str | None:
        return None

    def check(self) -> None:
        return

    def make(self) -> Engine:
        raise NotImplementedError


@settings_class
class MoreEngines(EngineSettings):
    """The list of engines with one more line."""

    minimal: MinimalEngineSettings | None = None


def test_a_new_engine_needs_one_line_in_the_list_of_engines() -> None:
    engine = MoreEngines(minimal=MinimalEngineSettings()).with_served_names(("m",))
    assert (engine.kind, engine.max_model_len) == ("minimal", 512)
    assert engine.hosted is engine.chosen is engine.minimal
    assert engine.chosen.served_model_names == ("m",)
    with pytest.raises(ValueError, match=r"\(emulated, vllm, remote or minimal\), got emulated, minimal"):
        MoreEngines(minimal=MinimalEngineSettings(), emulated=EmulatedEngineSettings())
