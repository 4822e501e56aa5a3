"""Settings of an application: keys, values and places in a file, and what is derived from them."""

import typing
from collections.abc import Iterator, Mapping
from dataclasses import MISSING
from pathlib import Path
from typing import Any, ClassVar

import pytest
import yaml

from serve_app.core.settings_base import Setting, block_of, in_files
from serve_app.core.settings_base import settings as settings_class
from serve_app.engines.emulated.engine import EmulatedEngineSettings
from serve_app.engines.engine import Engine
from serve_app.errors import SettingsError
from serve_app.settings.application import (
    ApplicationConfig,
    EngineSettings,
    http_address,
    load_settings,
    settings_of,
    with_port,
)
from serve_app.tuning import RefineAndPruneSettings, StrategicSettings
from serve_app.tuning.settings import TunerSettings
from tests.settings.builders import emulated, model, parse, pool, rejection


def test_the_tuner_is_set_in_the_words_of_yaml() -> None:
    def tuner(text: str) -> TunerSettings:
        return parse(model(tuner=yaml.safe_load(text))).models[0].tuner

    assert tuner("{mode: off}").mode is False
    assert tuner("{mode: on, advanced: {learn_from: 60, alpha: 2}}").strategic == StrategicSettings(
        window=60, refine_and_prune=RefineAndPruneSettings(alpha=2.0)
    )
    assert tuner("{mode: queues}").parameters is None
    advice = tuner("{mode: advise, profile: laptop, advanced: {slice_s: 30}}").parameters
    assert advice is not None
    assert (advice.profile, advice.rollout.mode, advice.rollout.slice_s) == ("laptop", "advise", 30.0)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"gateway": {"upstream": {}}},
            "gateway.upstream is an advanced setting: write it as gateway.advanced.upstream",
        ),
        (
            {"state_interval_s": 5},
            "state_interval_s is an advanced setting: write it as advanced.state_interval_s",
        ),
        (
            {"gateway": {"advanced": {"tracing": True}}},
            "gateway.advanced.tracing is not an advanced setting: write it as gateway.tracing",
        ),
        ({"advanced": {"gateway": {}}}, "advanced.gateway is not an advanced setting: write it as gateway"),
        ({"advanced": {"channel": {"advanced": {}}}}, "advanced.channel.advanced: unknown key"),
        ({"advanced": 3}, "advanced must be a mapping of settings, got 3"),
    ],
)
def test_an_advanced_setting_belongs_under_advanced_in_its_block(
    changes: dict[str, Any], message: str
) -> None:
    assert rejection(**changes) == message


def test_an_advanced_setting_is_an_ordinary_one_in_python() -> None:
    settings = parse(
        model(scheduler={"backpressure": {"target_waiting": 5, "advanced": {"max_prefill_backlog_s": 2.0}}}),
        advanced={"channel": {"ports": 2}, "state_interval_s": 5},
        gateway={"advanced": None},
    )
    backpressure = settings.models[0].scheduler.backpressure
    assert (backpressure.target_waiting, backpressure.max_prefill_backlog_s) == (5, 2.0)
    assert (settings.channel.ports, settings.state_interval_s) == (2, 5.0)


def test_a_mistake_in_an_advanced_setting_is_reported_by_its_full_name() -> None:
    isolation = {"short_work_share": 2, "max_longest_prefills": "few"}
    assert rejection(model(scheduler={"advanced": {"isolation": isolation}})).splitlines() == [
        "models[0].scheduler.advanced.isolation.short_work_share must be above 0 and below 1, got 2.0",
        "models[0].scheduler.advanced.isolation.max_longest_prefills must be a whole number, got 'few'",
    ]


@pytest.mark.parametrize(
    ("objective", "message"),
    [
        (
            {"class": 100},
            "gateway.objectives.vip.class must be one of interactive, default, batch, got 100",
        ),
        (
            {"queue_timeout_s": 90_000},
            "gateway.objectives.vip.queue_timeout_s must be from 0.001 to 86,400.0, got 90000.0",
        ),
        (
            {"latency_target": {"ttft_s": 0}},
            "gateway.objectives.vip.latency_target.ttft_s must be a positive number, got 0.0",
        ),
        ({"timeout_s": 5}, "gateway.objectives.vip.timeout_s: unknown key; did you mean queue_timeout_s?"),
    ],
)
def test_a_mistake_in_an_objective_is_reported_with_its_value(
    objective: dict[str, Any], message: str
) -> None:
    assert rejection(gateway={"objectives": {"vip": objective}}) == message


def test_an_objective_has_a_name_that_a_header_can_carry() -> None:
    assert rejection(gateway={"objectives": {"two words": {}}}) == (
        "gateway: the objective 'two words' does not fit into a header: use 1 to 128 printable ASCII "
        "characters without spaces"
    )


def test_a_gateway_receives_the_inference_pools_of_its_models() -> None:
    endpoints = ["http://a:8000", "inferencepool+http://chat.prod"]
    remote = {"name": "remote", "engine": {"remote": {"endpoints": endpoints}}}
    (served,) = parse({**model(pools=[remote]), "name": "m"}).gateway.models
    assert served.inference_pools == ("inferencepool+http://chat.prod",)


def test_a_key_with_nothing_behind_it_is_a_block_of_defaults() -> None:
    assert parse(model(scheduler=None), gateway=None) == parse()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"modles": []}, "modles: unknown key; did you mean models?"),
        (
            {"gateway": {"max_body_byte": 1}},
            "gateway.max_body_byte: unknown key; did you mean advanced.max_body_bytes?",
        ),
        ({"gateway": {"advanced": {"upstream": {"connect_timeout": 1}}}}, "did you mean connect_timeout_s?"),
        (
            {"advanced": {"channel": {"tsl": 1}}},
            "advanced.channel.tsl: unknown key; did you mean tls?",
        ),
        ({"advanced": {"channel": {"zzz": 1}}}, "advanced.channel.zzz: unknown key"),
        ({"chanel": {}}, "chanel: unknown key; did you mean advanced.channel?"),
        ({"gateways": {1: 2}}, "gateways.1: unknown key"),
        (
            {"models": [model(pools=[pool("short", min_replica=2)])]},
            "did you mean autoscaling.min_replicas?",
        ),
    ],
)
def test_an_unknown_key_is_rejected_by_its_full_name(changes: dict[str, Any], message: str) -> None:
    assert message in rejection(**changes)


def test_an_unknown_key_deep_in_a_model_is_rejected_by_its_full_name() -> None:
    broken = model(pools=[pool("short", engine=emulated(max_model_length=1)), pool("long")])
    assert rejection(broken) == (
        "models[0].pools[0].engine.emulated.max_model_length: unknown key; did you mean max_model_len?"
    )
    broken = model(scheduler={"backpressure": {"target_waitin": 1}})
    assert "models[0].scheduler.backpressure.target_waitin: unknown key; did you mean" in rejection(broken)


def test_all_mistakes_are_reported_at_once() -> None:
    message = rejection(gateway={"log_request": True}, advanced={"channel": {"zzz": 1}}, state_uri=4)
    assert len(message.splitlines()) == 3


def spread(*bundles: dict[str, float], **resources: Any) -> dict[str, Any]:
    """Return a pool whose engines span several nodes."""
    advanced = {"placement_bundles": bundles, "placement_strategy": "STRICT_SPREAD"}
    return pool("long", resources={**resources, "advanced": advanced})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"scheduler": {"max_waiting": 0}}, "models[0].scheduler.max_waiting must be at least 1, got 0"),
        ({"scheduler": {"max_waiting": "many"}}, "got 'many'"),
        (
            {"pools": [pool("short", engine={})]},
            "set exactly one engine (emulated, vllm or remote), got none",
        ),
        ({"pools": [{"name": "long"}]}, "models[0].pools[0].engine is missing"),
        ({"pools": [pool("long", replicas=0)]}, "replicas must be at least 1, got 0"),
        ({"pools": [pool("long", replicas=1, autoscaling={})]}, "set replicas or autoscaling, not both"),
        (
            {"pools": [pool("long", engine=emulated(profile="nope"))]},
            "models[0].pools[0].engine.emulated: no engine profile 'nope'",
        ),
        (
            {"pools": [pool("long", engine=emulated(advanced={"kv_tokens": 64}))]},
            "models[0].pools[0].engine.emulated: emulated engine",
        ),
        ({"pools": [pool("long", resources={"num_gpus": 1.5})]}, "whole number, got 1.5"),
        (
            {"pools": [pool("long", resources={"advanced": {"placement_strategy": "STRICT_SPREAD"}})]},
            "models[0].pools[0].resources: resources.placement_strategy STRICT_SPREAD needs",
        ),
        ({"pools": [spread({"GPU": 8}, {"GPU": 8})]}, "which needs CPU: 1, but has CPU: 0"),
        (
            {"pools": [spread({"CPU": 1}, {}, accelerator_type="H100")]},
            "resources.placement_bundles[1] must name resources with amounts above 0, got {}",
        ),
        (
            {"pools": [spread({"CPU": 1, "GPU": 8}, {"GPU": 8}, accelerator_type="H100")]},
            "which needs accelerator_type:H100: 0.001, but has accelerator_type:H100: 0",
        ),
        ({"pools": [spread({"CPU": 1}, custom={"rack": 1})]}, "needs rack: 1, but has rack: 0"),
        ({"pools": [pool("long", autoscaling={"min_replicas": 2})]}, "got min 2, initial None, max 1"),
        ({"pools": [pool("long", replicas=1)], "advanced": {"gpu_budget": 0}}, "gpu_budget must be positive"),
        ({"pools": [pool("long", advanced={"server": {"port": 99_999}})]}, "99999"),
        (
            {"scheduler": {"routing": {"b_short_tokens": 4_000}}},
            "b_short_tokens of 4,000 exceeds the context of pool short (max_model_len 2,048)",
        ),
        ({"scheduler": {"model": "other"}}, "models[0].scheduler.model cannot be set here: it is derived"),
        (
            {"scheduler": {"routing": {"pools": ["a"]}}},
            "scheduler.routing.pools cannot be set here",
        ),
    ],
)
def test_a_value_out_of_range_is_rejected_with_its_place(changes: dict[str, Any], message: str) -> None:
    assert message in rejection(model(**changes))


@pytest.mark.parametrize("args", [[], "demo", None, {"models": "demo"}, {"models": [1]}, {"models": []}, {}])
def test_a_file_of_another_shape_is_rejected_without_a_crash(args: Any) -> None:
    with pytest.raises(SettingsError):
        settings_of(args)


@pytest.mark.parametrize(
    "text",
    [
        *("applications: []", "- 1", "applications: [{import_path: a:a}, {import_path: b:b}]"),
        *("a: [", "a: 2026-13-45", "a: \xff", "[" * 3_000),
    ],
)
def test_a_file_without_our_application_is_rejected(tmp_path: Path, text: str) -> None:
    path = tmp_path / "serve.yaml"
    path.write_text(text, encoding="latin-1")
    with pytest.raises(SettingsError, match=r"serve\.yaml"):
        load_settings(path)


def test_a_missing_file_is_rejected_with_its_name(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match="none"):
        load_settings(tmp_path / "none.yaml")


def test_learned_state_is_stored_in_a_folder_that_every_actor_finds() -> None:
    assert parse().state_uri is None
    assert parse(state_uri="s3://bucket/folder").state_uri == "s3://bucket/folder"
    assert parse(state_uri="/var/lib/ewsjf").state_uri == "/var/lib/ewsjf"
    assert "state_uri must be an absolute path or a URI, got 'state'" in rejection(state_uri="state")
    assert (
        rejection(advanced={"state_interval_s": 0}) == "advanced.state_interval_s must be positive, got 0.0"
    )


# -- settings derived from the models, and settings that contradict each other ----------------------------


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


def test_an_emulated_pool_has_the_context_of_its_profile() -> None:
    pools = [pool("short"), {"name": "long", "engine": emulated(profile="llama31-8b-rtx4090-tp1")}]
    settings = parse(model(pools=pools))
    assert settings.models[0].pools[1].engine.max_model_len == 16_384
    assert settings.gateway.models[0].max_model_len == 16_384


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
        (
            ({}, {"engine": emulated(max_model_len=1_024)}, {}),
            "by increasing context, got max_model_len 2,048 in small before 1,024 in middle",
        ),
        (
            ({}, {}, {"engine": emulated(max_model_len=4_096)}),
            "by increasing context, got max_model_len 8,192 in middle before 4,096 in large",
        ),
    ],
)
def test_boundaries_and_costs_that_do_not_go_together_are_rejected(
    changes: tuple[dict[str, Any], ...], message: str
) -> None:
    assert message in rejection(model(pools=tiers(*changes)))


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


# -- advanced settings: under `advanced` once, and with a default -----------------------------------------


def leaves(
    cls: type, path: str = "args", *, is_advanced: bool = False
) -> Iterator[tuple[str, Setting, bool]]:
    """Yield every setting with a value, its path, and whether it or an enclosing block is advanced."""
    for setting in in_files(cls).values():
        here, apart = f"{path}.{setting.name}", is_advanced or setting.is_advanced
        assert not (is_advanced and setting.is_advanced), f"{here} is marked inside an advanced block"
        block = inner_block(setting.kind)
        if block is None:
            yield here, setting, apart
        else:
            yield from leaves(block, here, is_advanced=apart)


def inner_block(kind: Any) -> type | None:
    """Return the block class of a setting that is a block or a list of blocks."""
    arguments = typing.get_args(kind)
    return block_of(arguments[0]) if typing.get_origin(kind) is tuple else block_of(kind)


def test_an_advanced_setting_has_a_default() -> None:
    without = [
        path
        for path, setting, is_advanced in leaves(ApplicationConfig)
        if is_advanced and setting.default is MISSING
    ]
    assert without == []


# -- address ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "host"),
    [({"host": "::1", "port": 1}, "::1"), ({}, "0.0.0.0"), (None, "0.0.0.0"), ("wrong", "0.0.0.0")],
)
def test_another_port_replaces_that_of_the_file(options: object, host: str) -> None:
    content = {"applications": [], "http_options": options}
    changed = with_port(content, 8123)
    assert http_address(changed) == (host, 8123)
    assert changed["applications"] == []
    assert content["http_options"] == options
    assert with_port(content, None) is content
