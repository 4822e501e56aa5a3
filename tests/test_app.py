"""Deployments that `build_app` binds, without a cluster."""

import pickle
from dataclasses import is_dataclass
from pathlib import Path
from typing import Any, cast

import pytest
from ray.serve import Deployment
from ray.serve.deployment import deployment_to_schema

from serve_app.app import application_of
from serve_app.errors import SettingsError
from serve_app.serving._ray import deployments_of
from serve_app.serving.autoscaling import TUNER
from serve_app.serving.pool import PoolReplicaSettings
from serve_app.settings.application import ApplicationSettings, load_settings, settings_of

CONFIGS = Path(__file__).parent.parent / "configs"


def emulated(name: str, **changes: Any) -> dict[str, Any]:
    limits = {"short": 2_048, "long": 8_192}
    return {"name": name, "engine": {"emulated": {"max_model_len": limits[name]}}, **changes}


def settings(*models: dict[str, Any], **changes: Any) -> ApplicationSettings:
    default = {"name": "demo", "aliases": ["alias"], "pools": [emulated("short"), emulated("long")]}
    return settings_of({"models": list(models) or [default], **changes})


def options(deployment: Deployment) -> dict[str, Any]:
    """Return the options that the application sets, as a configuration file has them."""
    found: dict[str, Any] = deployment_to_schema(deployment).model_dump(exclude_unset=True)
    return found


def arguments(deployment: Deployment) -> tuple[Any, ...]:
    """Return the constructor arguments of its replicas."""
    return cast("tuple[Any, ...]", deployment.init_args)


def test_every_model_has_a_scheduler_and_its_pools_and_all_share_the_gateways() -> None:
    other = {"name": "org/Other-7B", "pools": [emulated("long")], "scheduler": {"policy": "fcfs"}}
    pools = [emulated("short"), emulated("long")]
    demo = {"name": "demo", "pools": pools, "scheduler": {"policy": "ewsjf"}}
    found = deployments_of(application_of(settings(demo, other)))
    assert set(found) == {
        "gateway",
        "scheduler-demo",
        "tuner-demo",
        "short-demo",
        "long-demo",
        "scheduler-org-Other-7B",
        "long-org-Other-7B",
    }


def test_a_model_whose_policy_learns_queues_has_a_tuner() -> None:
    def names(**changes: Any) -> set[str]:
        demo = {"name": "demo", "pools": [emulated("long")], **changes}
        return set(deployments_of(application_of(settings(demo))))

    plain = {"gateway", "scheduler-demo", "long-demo"}
    tuned = plain | {"tuner-demo"}
    assert names(scheduler={"policy": "ewsjf"}) == tuned
    assert names(scheduler={"policy": "ewsjf"}, tuner={"mode": False}) == plain
    assert names(tuner={"mode": True}) == tuned
    assert names(scheduler={"policy": "sjf-aging"}) == plain


def test_a_scheduler_is_never_scaled() -> None:
    fixed = settings({"name": "demo", "pools": [emulated("long")], "tuner": {"mode": False}})
    assert options(deployments_of(application_of(fixed))["scheduler-demo"])["num_replicas"] == 1
    scaling = scaling_of("scheduler-demo", settings())
    assert (scaling["min_replicas"], scaling["max_replicas"]) == (1, 1)


def test_the_tuner_is_started_by_its_scheduler_unless_it_has_a_persisted_state() -> None:
    scaling = scaling_of("tuner-demo", settings())
    assert (scaling["min_replicas"], scaling["initial_replicas"], scaling["max_replicas"]) == (0, 0, 1)
    assert scaling["policy"]["policy_kwargs"] == {"scheduler": "scheduler-demo", "pool": TUNER}
    with_state = deployments_of(application_of(settings(state_uri="/var/lib/ewsjf")))
    assert options(with_state["tuner-demo"])["num_replicas"] == 1


def scaling_of(deployment: str, found: ApplicationSettings) -> Any:
    """Return Ray Serve's autoscaling settings of a deployment."""
    return options(deployments_of(application_of(found))[deployment])["autoscaling_config"]


def test_a_pool_gets_the_resources_in_its_settings() -> None:
    resources = {"num_cpus": 2, "num_gpus": 4, "accelerator_type": "H100", "custom": {"rack": 1}}
    pool = emulated(
        "long", replicas=3, resources=resources, drain_timeout_s=100.0, health_check_timeout_s=50.0
    )
    found = deployments_of(application_of(settings({"name": "demo", "pools": [pool]})))["long-demo"]
    assert found.num_replicas == 3
    actor = found.ray_actor_options or {}
    assert (actor["num_cpus"], actor["num_gpus"]) == (2, 4)
    assert actor["resources"]["rack"] == 1
    assert any("H100" in name for name in actor["resources"]) or actor["accelerator_type"] == "H100"
    # The replica drains, then frees its engine; only then may Ray end it.
    assert options(found)["graceful_shutdown_timeout_s"] > 100.0
    assert options(found)["health_check_timeout_s"] == 50.0
    given = arguments(found)[0]
    assert isinstance(given, PoolReplicaSettings)
    assert given.health_timeout_s < 50.0


def test_an_engine_over_several_nodes_gets_a_placement_group() -> None:
    bundles = [{"CPU": 1, "GPU": 8}, {"GPU": 8}]
    resources = {"num_cpus": 1, "advanced": {"placement_bundles": bundles}}
    pool = emulated("long", resources=resources)
    found = deployments_of(application_of(settings({"name": "demo", "pools": [pool]})))["long-demo"]
    assert options(found)["placement_group_bundles"] == [{"CPU": 1, "GPU": 8}, {"GPU": 8}]


def test_each_pool_is_scaled_by_its_own_settings_and_our_policy() -> None:
    short = emulated("short", autoscaling={"max_replicas": 4})
    found = deployments_of(application_of(settings({"name": "demo", "pools": [short, emulated("long")]})))
    pool, scheduler = (
        options(found[name])["autoscaling_config"] for name in ("short-demo", "scheduler-demo")
    )
    assert (pool["min_replicas"], pool["max_replicas"]) == (1, 4)
    assert pool["policy"]["policy_function"] == "serve_app.serving.autoscaling:PoolPolicy"
    assert pool["policy"]["policy_kwargs"] == {"scheduler": "scheduler-demo", "pool": "short"}
    assert (scheduler["min_replicas"], scheduler["max_replicas"]) == (1, 1)
    assert scheduler["policy"]["policy_kwargs"] == {"scheduler": "scheduler-demo"}
    assert "autoscaling_config" not in options(found["long-demo"])


def test_gateways_are_a_fixed_number_or_scaled_and_never_both() -> None:
    def config(**gateways: Any) -> dict[str, Any]:
        return options(deployments_of(application_of(settings(gateways=gateways)))["gateway"])

    assert config()["num_replicas"] == 1
    assert config(replicas=3)["num_replicas"] == 3
    scaled = config(autoscaling={"min_replicas": 2, "max_replicas": 4})["autoscaling_config"]
    assert (scaled["min_replicas"], scaled["max_replicas"]) == (2, 4)
    assert scaled["policy"]["policy_function"] == "serve_app.serving.autoscaling:GatewayPolicy"
    with pytest.raises(SettingsError, match="set replicas or autoscaling, not both"):
        config(replicas=1, autoscaling={"max_replicas": 4})


def test_a_replaced_process_continues_until_its_successor_serves() -> None:
    found = deployments_of(application_of(settings()))
    surge = {name: options(each).get("max_surge_percent", 0) for name, each in found.items()}
    assert surge == {
        "gateway": 100,
        "scheduler-demo": 100,
        "short-demo": 25,
        "long-demo": 25,
        "tuner-demo": 0,
    }


def test_dead_processes_are_noticed_within_a_second() -> None:
    found = deployments_of(application_of(settings()))
    # The tuner may be away for longer: nothing waits for it.
    periods = {name: options(each).get("health_check_period_s") for name, each in found.items()}
    assert {period for name, period in periods.items() if not name.startswith("tuner")} <= {0.5, 1.0}


def test_hanging_gateways_and_schedulers_are_replaced_within_half_a_minute() -> None:
    found = deployments_of(application_of(settings()))
    timeouts_s = [
        options(each)["health_check_timeout_s"]
        for name, each in found.items()
        if name.startswith(("gateway", "scheduler"))
    ]
    assert len(timeouts_s) == 2
    # Serve replaces a process after three failed checks.
    assert all(3 * timeout_s <= 30.0 for timeout_s in timeouts_s)


def test_the_gateway_has_every_name_of_every_model() -> None:
    application = application_of(settings())
    gateway = deployments_of(application)["gateway"]
    served, _channel, schedulers, names, endpoints, *_, others = arguments(gateway)
    assert [model.name for model in served.models] == ["demo", "alias"]
    assert names == {"demo": "demo", "alias": "demo"}
    assert set(schedulers) == {"demo"}
    assert endpoints == {"demo": {}}
    assert {handle.deployment_name for handle in others} >= {"short-demo", "long-demo"}


def test_the_same_settings_build_the_same_application() -> None:
    """Serve restarts replicas whose arguments have changed, so nothing random may be among them."""

    def pickled() -> dict[str, list[bytes]]:
        found = deployments_of(application_of(load_settings(CONFIGS / "local.yaml")))
        return {
            name: [pickle.dumps(argument) for argument in arguments(deployment) if is_dataclass(argument)]
            for name, deployment in found.items()
        }

    first = pickled()
    assert all(first.values())
    assert first == pickled()


def test_model_names_with_equal_deployment_names_are_rejected() -> None:
    models = [{"name": name, "pools": [emulated("long")]} for name in ("a/b", "a b")]
    with pytest.raises(SettingsError, match="long-a-b"):
        application_of(settings(*models))


def test_endpoints_have_one_small_watcher_however_many_they_are() -> None:
    remote = {"endpoints": [f"http://far:{port}" for port in range(8000, 8100)]}
    models = ({"name": "far", "pools": [{"name": "long", "engine": {"remote": remote}}]},)
    application = application_of(settings(*models))
    watcher = deployments_of(application)["long-far"]
    assert options(watcher)["num_replicas"] == 1
    assert watcher.ray_actor_options is not None
    assert watcher.ray_actor_options["num_cpus"] == 0.1
    endpoints = arguments(deployments_of(application)["gateway"])[4]
    assert endpoints["far"]["long"].deployment_name == "long-far"
