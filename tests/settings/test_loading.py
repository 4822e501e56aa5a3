"""Keys, values and places in a settings file, and error messages about them."""

from pathlib import Path
from typing import Any

import pytest
import yaml

from serve_app.errors import SettingsError
from serve_app.settings.application import load_settings, settings_of
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
    "text", ["applications: []", "- 1", "applications: [{import_path: other:app}]", "a: ["]
)
def test_a_file_without_our_application_is_rejected(tmp_path: Path, text: str) -> None:
    path = tmp_path / "serve.yaml"
    path.write_text(text)
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
