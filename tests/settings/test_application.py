from pathlib import Path
from typing import Any

import pytest
import yaml
from ray.autoscaler._private.util import prepare_config, validate_config

from serve_app.errors import SettingsError
from serve_app.request import PriorityClass
from serve_app.settings.application import AppSettings
from serve_app.settings.loading import load_settings, settings_of

CONFIGS = Path(__file__).parents[2] / "configs"


def emulated(**limits: Any) -> dict[str, Any]:
    return {"emulated": limits}


def pool(name: str, **changes: Any) -> dict[str, Any]:
    limits = {"short": 2_048, "long": 8_192}
    return {"name": name, "engine": emulated(max_model_len=limits[name]), **changes}


def model(**changes: Any) -> dict[str, Any]:
    return {"name": "demo", "pools": [pool("short"), pool("long")], **changes}


def parse(*models: dict[str, Any], **changes: Any) -> AppSettings:
    return settings_of({"models": list(models) or [model()], **changes})


def refusal(*models: dict[str, Any], **changes: Any) -> str:
    with pytest.raises(SettingsError) as caught:
        parse(*models, **changes)
    return str(caught.value)


def test_a_component_is_told_what_the_model_says_once() -> None:
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


def test_the_tuner_is_set_in_the_words_of_yaml() -> None:
    block = yaml.safe_load(
        "{mode: off, pull_interval_s: 2, strategic: {interval_s: 60, drift: {min_shift: 0.2}}}"
    )
    tuner = parse(model(tuner=block)).models[0].tuner
    assert tuner.mode is False
    assert (tuner.strategic.interval_s, tuner.strategic.drift.min_shift) == (60.0, 0.2)
    assert "did you mean interval_s?" in refusal(model(tuner={"strategic": {"intervall_s": 60}}))
    assert "interval_s must be a positive number" in refusal(model(tuner={"strategic": {"interval_s": 0}}))


def test_a_token_budget_that_nobody_chose_fits_the_first_pool() -> None:
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


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"modles": []}, "modles: unknown key; did you mean models?"),
        (
            {"gateway": {"max_body_byte": 1}},
            "gateway.max_body_byte: unknown key; did you mean max_body_bytes?",
        ),
        ({"gateway": {"upstream": {"connect_timeout": 1}}}, "did you mean connect_timeout_s?"),
        ({"channel": {"heartbeat": 1}}, "channel.heartbeat: unknown key; did you mean heartbeat_s?"),
        ({"channel": {"zzz": 1}}, "channel.zzz: unknown key"),
    ],
)
def test_an_unknown_key_is_refused_by_its_full_name(changes: dict[str, Any], message: str) -> None:
    assert message in refusal(**changes)


def test_an_unknown_key_deep_in_a_model_is_refused_by_its_full_name() -> None:
    broken = model(pools=[pool("short", engine=emulated(max_model_length=1)), pool("long")])
    assert refusal(broken) == (
        "models[0].pools[0].engine.emulated.max_model_length: unknown key; did you mean max_model_len?"
    )
    broken = model(scheduler={"backpressure": {"target_waitin": 1}})
    assert "models[0].scheduler.backpressure.target_waitin: unknown key; did you mean" in refusal(broken)


def test_all_faults_are_told_at_once() -> None:
    told = refusal(gateway={"log_request": True}, channel={"heartbeat": 1})
    assert len(told.splitlines()) == 2


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"scheduler": {"max_waiting": 0}}, "models[0].scheduler.max_waiting must be at least 1, got 0"),
        ({"scheduler": {"max_waiting": "many"}}, "got 'many'"),
        (
            {"pools": [pool("short", engine={})]},
            "give exactly one engine (emulated, vllm or remote), got none",
        ),
        ({"pools": [{"name": "long"}]}, "models[0].pools[0].engine: is missing"),
        ({"pools": [pool("long", replicas=0)]}, "replicas must be at least 1, got 0"),
        ({"pools": [pool("long", replicas=1, autoscaling={})]}, "give replicas or autoscaling, not both"),
        (
            {"pools": [pool("long", engine=emulated(profile="nope"))]},
            "models[0].pools[0].engine: no engine profile 'nope'",
        ),
        (
            {"pools": [pool("long", engine=emulated(kv_tokens=64))]},
            "models[0].pools[0].engine: emulated engine",
        ),
        ({"pools": [pool("long", resources={"num_gpus": 1.5})]}, "whole number, got 1.5"),
        ({"pools": [pool("long", autoscaling={"max_replicas": 0})]}, "max 0"),
        ({"pools": [pool("long", server={"port": 99_999})]}, "99999"),
        ({"scheduler": {"model": "other"}}, "models[0].scheduler.model is not given here"),
        ({"scheduler": {"routing": {"pools": ["a"]}}}, "models[0].scheduler.routing.pools is not given here"),
    ],
)
def test_a_value_out_of_range_is_refused_with_its_place(changes: dict[str, Any], message: str) -> None:
    assert message in refusal(model(**changes))


def test_pools_in_the_wrong_order_are_refused() -> None:
    told = refusal(model(pools=[pool("long"), pool("short")]))
    assert "the pool with the shorter context comes first" in told
    assert "8,192" in told


def test_a_token_budget_that_the_short_pool_cannot_hold_is_refused() -> None:
    told = refusal(model(scheduler={"routing": {"b_short_tokens": 4_000}}))
    assert "b_short_tokens of 4,000 exceeds what pool short holds (max_model_len 2,048)" in told


def priority_model(*engines: dict[str, Any]) -> dict[str, Any]:
    pools = [
        {"name": name, "engine": engine} for name, engine in zip(("short", "long"), engines, strict=True)
    ]
    return model(pools=pools, scheduler={"engine_priority": {"enabled": True}})


def test_engine_priority_wants_engines_that_schedule_by_it() -> None:
    ready = emulated(max_model_len=2_048, scheduling_policy="priority")
    args = {"max_model_len": 4_096}
    assert refusal(priority_model(ready, emulated(max_model_len=8_192))) == (
        "models[0].scheduler.engine_priority is enabled, but the engine of pool long does not schedule by "
        "priority: set models[0].pools[1].engine.emulated.scheduling_policy to priority"
    )
    told = refusal(priority_model(ready, {"vllm": {"model": "/weights", "args": args}}))
    assert "set models[0].pools[1].engine.vllm.args.scheduling_policy to priority" in told
    told = refusal(
        priority_model(ready, {"vllm": {"model": "/w", "args": {**args, "scheduling_policy": "fcfs"}}})
    )
    assert "pool long does not schedule by priority" in told


def test_engine_priority_takes_vllm_engines_that_have_it_and_remote_ones_on_trust() -> None:
    args = {"max_model_len": 4_096, "scheduling_policy": "priority"}
    vllm = {"vllm": {"model": "/weights", "args": args}}
    remote = {"remote": {"base_url": "http://engine:8000"}}
    enabled = parse(priority_model(vllm, remote)).models[0]
    assert enabled.scheduler.engine_priority.enabled
    assert [pool.engine.schedules_by_priority for pool in enabled.pools] == [True, None]


def test_engines_may_schedule_by_priority_without_being_told_one() -> None:
    settings = parse(model(pools=[pool("long", engine=emulated(scheduling_policy="priority"))]))
    assert not settings.models[0].scheduler.engine_priority.enabled


def test_three_pools_are_refused() -> None:
    pools = [pool("short"), pool("long"), {**pool("long"), "name": "longer"}]
    assert "one or two pools, got 3" in refusal(model(pools=pools))


def test_two_models_with_one_name_are_refused() -> None:
    assert "demo" in refusal(model(), model())
    assert "gpt" in refusal(model(aliases=["gpt"]), model(name="other", aliases=["gpt"]))


@pytest.mark.parametrize("args", [[], "demo", None, {"models": "demo"}, {"models": [1]}, {"models": []}, {}])
def test_a_file_of_another_shape_is_refused_without_a_crash(args: Any) -> None:
    with pytest.raises(SettingsError):
        settings_of(args)


@pytest.mark.parametrize("name", ["local", "cpu_vllm", "remote", "gpu_1x", "gpu_8x"])
def test_every_configuration_that_is_shipped_parses(name: str) -> None:
    assert list(load_settings(CONFIGS / f"{name}.yaml").served_names())


def test_the_kubernetes_service_parses_and_runs_with_the_settings_of_serve_env() -> None:
    spec = yaml.safe_load((CONFIGS / "kuberay.yaml").read_text())["spec"]
    ours = yaml.safe_load(spec["serveConfigV2"])["applications"][0]
    assert list(settings_of(ours["args"]).served_names())
    lines = (CONFIGS.parent / "scripts" / "serve.env").read_text().splitlines()
    expected = dict(line.split("=", 1) for line in lines if line and not line.startswith("#"))
    cluster = spec["rayClusterConfig"]
    for group in (cluster["headGroupSpec"], *cluster["workerGroupSpecs"]):
        container = group["template"]["spec"]["containers"][0]
        assert {entry["name"]: entry["value"] for entry in container["env"]} == expected


def test_the_cluster_launcher_takes_our_cluster() -> None:
    content = yaml.safe_load((CONFIGS.parent / "cluster.yaml").read_text())
    validate_config(prepare_config(content))
    assert set(content["available_node_types"]) == {"head", "gpu_worker"}
    # Ray's processes read scripts/serve.env when they start, on every node.
    for kind in ("head", "worker"):
        assert any("scripts/serve.env" in command for command in content[f"{kind}_start_ray_commands"])


def test_the_real_model_on_a_cpu_sends_three_thousand_tokens_to_the_long_pool() -> None:
    chosen = load_settings(CONFIGS / "cpu_vllm.yaml").models[0]
    assert [pool.engine.max_model_len for pool in chosen.pools] == [2_048, 8_192]
    assert chosen.scheduler.routing.b_short_tokens < 3_000
    assert chosen.scheduler.queue_timeout_s.of(PriorityClass.DEFAULT) >= 300


@pytest.mark.parametrize(
    "text", ["applications: []", "- 1", "applications: [{import_path: other:app}]", "a: ["]
)
def test_a_file_without_our_application_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "serve.yaml"
    path.write_text(text)
    with pytest.raises(SettingsError, match=r"serve\.yaml"):
        load_settings(path)


def test_a_missing_file_is_refused_with_its_name(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match="none"):
        load_settings(tmp_path / "none.yaml")


def test_learned_state_is_kept_in_a_folder_that_every_actor_finds() -> None:
    assert parse().state_uri is None
    assert parse(state_uri="s3://bucket/folder").state_uri == "s3://bucket/folder"
    assert parse(state_uri="/var/lib/ewsjf", state_interval_s=5).state_interval_s == 5.0
    assert "state_uri must be an absolute path or a URI, got 'state'" in refusal(state_uri="state")
    assert "state_interval_s must be positive, got 0.0" in refusal(state_interval_s=0)
