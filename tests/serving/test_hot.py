"""Settings changes: which processes are replaced, and which apply them while running."""

import functools
import pickle
from pathlib import Path
from typing import Any

import pytest
from ray.serve import Deployment

from experiments.common.redeployment import changed_args
from serve_app.app import application_of
from serve_app.cli.serve.changes import UNCHANGED, effects
from serve_app.core.settings_base import with_hot_settings
from serve_app.errors import SettingsError
from serve_app.serving._ray import deployments_of
from serve_app.serving.gateway.settings import gateway_hot, with_hot_gateway
from serve_app.serving.scheduler.actor import SchedulerActorSettings
from serve_app.settings.application import load_settings, settings_of
from tests.test_app import arguments

ROOT = Path(__file__).parents[2]
CONFIGS = sorted(
    path
    for path in (ROOT / "configs").glob("*.yaml")
    if "import_path" in path.read_text() and path.stem != "kuberay"
)
GATEWAY, SCHEDULER, TUNER = "gateway", "scheduler-demo", "tuner-demo"
SHORT, LONG = "short-demo", "long-demo"
ALL = {GATEWAY, SCHEDULER, TUNER, SHORT, LONG}


def pool(name: str, max_model_len: int) -> dict[str, Any]:
    engine = {"emulated": {"max_model_len": max_model_len}}
    return {"name": name, "engine": engine, "autoscaling": {"max_replicas": 3}}


ARGS: dict[str, Any] = {"models": [{"name": "demo", "pools": [pool("short", 2_048), pool("long", 8_192)]}]}
POOL = "models[].pools[]"
JWT = {
    "issuer": "https://a.example",
    "audience": "us",
    "tenant_claim": "team",
    "jwks_url": "https://a.example/keys",
    "groups": [{"name": "users", "tokens_per_day": 5, "models": ["demo"]}],
}
# Path, new value and replaced processes; the table in `docs/operations.md` is the same.
CHANGES: dict[str, tuple[Any, set[str]]] = {
    "models[].scheduler": ({"max_waiting": 9, "fairness": {"weights": {"a": 2.0}}}, set()),
    "models[].advanced.gpu_budget": (7.0, set()),
    f"{POOL}.autoscaling": ({"min_replicas": 2, "max_replicas": 4}, set()),
    f"{POOL}.advanced.cost": (2.0, set()),
    f"{POOL}.health_check_timeout_s": (77.0, {SHORT}),
    f"{POOL}.drain_timeout_s": (77.0, {SHORT}),
    f"{POOL}.engine": ({"emulated": {"max_model_len": 2_048, "max_num_seqs": 3}}, {SHORT}),
    f"{POOL}.advanced.server": ({"port": 22_000}, {SHORT}),
    "models[].tuner": ({"mode": True, "profile": "laptop"}, {TUNER}),
    "models[].decision_log": ({"path": "/tmp/log-{incarnation}.jsonl"}, {SCHEDULER}),
    "models[].aliases": (["other"], {GATEWAY, SHORT, LONG}),
    "gateway.keys": ([{"tenant": "a", "key": "secret-of-a"}], set()),
    "gateway.keys_file": ("/keys.yaml", set()),
    "gateway.jwt": (JWT, set()),
    "gateway.cors": ({"allow_origins": ["https://a.example"]}, set()),
    "gateway.advanced.log_requests": (False, set()),
    "gateway.advanced.max_body_bytes": (2_048, set()),
    "gateway.prefix": ({"per_tenant": True}, set()),
    "gateway.advanced.upstream": ({"connect_timeout_s": 9.0}, {GATEWAY}),
    "gateway.tracing": (True, {GATEWAY}),
    "gateways.replicas": (3, set()),
    "gateways.autoscaling": ({"max_replicas": 3}, {GATEWAY}),
    "state_uri": ("/var/lib/other", {SCHEDULER, TUNER}),
    "advanced.channel": ({"port": 21_000}, {GATEWAY, SCHEDULER, SHORT, LONG}),
}


def built(args: dict[str, Any]) -> dict[str, Deployment]:
    return deployments_of(application_of(settings_of(args)))


@functools.cache
def unchanged() -> dict[str, Deployment]:
    return built(ARGS)


def version(deployment: Deployment) -> str:
    """Return the version that the controller receives, whatever version Serve sets."""
    config = deployment._deployment_config
    config.version = "of the application"
    return str(config.to_proto().version)  # type: ignore[no-untyped-call]


@pytest.mark.parametrize("path", CHANGES)
def test_a_change_replaces_only_processes_that_cannot_apply_it(path: str) -> None:
    value, replaced = CHANGES[path]
    before = unchanged()
    after = built(changed_args(ARGS, {path.replace("[]", ".0"): value}))
    assert set(before) == ALL
    assert {name for name in ALL if version(before[name]) != version(after[name])} == replaced
    # `deploy` announces the same.
    announced = effects(before, after)
    assert {name for name, effect in announced.items() if effect.startswith("replaced")} == replaced
    assert set(announced.values()) != {UNCHANGED}
    # A change that replaces no process must reach one as configuration.
    same = all(
        before[name]._deployment_config == after[name]._deployment_config
        and before[name].ray_actor_options == after[name].ray_actor_options
        for name in ALL
    )
    assert bool(replaced) or not same


def test_the_same_settings_are_the_same_version_and_other_models_do_not_matter() -> None:
    other = {"name": "other", "pools": [pool("only", 4_096)]}
    both = built({"models": [*ARGS["models"], other]})
    for name, deployment in unchanged().items():
        changes = name == GATEWAY
        assert (version(deployment) != version(both[name])) is changes


@pytest.mark.parametrize("config", CONFIGS, ids=lambda path: path.stem)
def test_a_running_process_gets_the_settings_of_a_new_one(config: Path) -> None:
    settings = load_settings(config)
    assert with_hot_gateway(settings.gateway, gateway_hot(settings.gateway)) == settings.gateway
    for name, deployment in deployments_of(application_of(settings)).items():
        if name.startswith("scheduler-"):
            actor = arguments(deployment)[0]
            assert isinstance(actor, SchedulerActorSettings)
            assert actor.with_hot(actor.hot()) == actor
            assert deployment.user_config == actor.hot()


def test_unusual_values_survive_the_way_into_a_process() -> None:
    scheduler = {
        "queue_timeout_s": {"batch": float("inf")},
        "fairness": {"mode": "requests", "weights": {"a": 2.5}},
        "policy": "sjf-aging",
        "advanced": {
            "class_floors": {},
            "no_replica_grace_s": float("inf"),
            "isolation": {"max_long_prefills": 0},
        },
    }
    key = {"tenant": "a", "env": "A_KEY", "highest_class": "default", "advanced": {"default_class": "batch"}}
    gateway = {"keys": [key], "advanced": {"metrics_key": {"key": "secret-of-metrics"}}}
    settings = settings_of(changed_args(ARGS, {"models.0.scheduler": scheduler, "gateway": gateway}))
    assert with_hot_gateway(settings.gateway, gateway_hot(settings.gateway)) == settings.gateway
    found = deployments_of(application_of(settings))
    actor = arguments(found[SCHEDULER])[0]
    # As Ray Serve transmits them.
    assert actor.with_hot(pickle.loads(pickle.dumps(found[SCHEDULER].user_config))) == actor


def test_serve_can_hand_settings_to_what_it_makes_of_a_gateway() -> None:
    made = unchanged()[GATEWAY].func_or_class
    assert all(hasattr(made, name) for name in ("reconfigure", "record_autoscaling_stats", "open_requests"))


def test_the_table_of_the_documents_is_this_one() -> None:
    page = (ROOT / "docs" / "operations.md").read_text()
    missing = [path for path in CHANGES if f"`{path}`" not in page]
    assert not missing


def test_cold_and_unknown_names_are_rejected_with_what_may_change() -> None:
    gateway = settings_of(ARGS).gateway
    with pytest.raises(SettingsError, match=r"'upstream', which cannot change .* set it in the args .* cors"):
        with_hot_gateway(gateway, {"upstream": {}})
    with pytest.raises(SettingsError, match="'kyes'"):
        with_hot_gateway(gateway, {"kyes": []})
    with pytest.raises(SettingsError, match="max_body_bytes"):
        with_hot_gateway(gateway, {"max_body_bytes": 3})
    with pytest.raises(SettingsError, match="allow_origins"):
        with_hot_settings(gateway, {"cors": {"allow_origins": ["nonsense"]}}, ())
