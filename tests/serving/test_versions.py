"""Ray Serve's own rules for replacing processes, applied to two versions of an application."""

from typing import Any

import pytest
import ray
from ray.serve._private.deploy_utils import deploy_args_to_deployment_info, get_deploy_args
from ray.serve._private.deployment_info import DeploymentInfo
from ray.serve._private.version import DeploymentVersion

from experiments.common.redeployment import changed_args
from serve_app.serving.deployments import version_of
from tests.serving.test_hot import ARGS, GATEWAY, LONG, SCHEDULER, SHORT, built


class Driver:
    """Runtime context of a process that is connected to a cluster."""

    def get_job_id(self) -> str:
        return "01000000"


@pytest.fixture(autouse=True)
def driver(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray, "get_runtime_context", Driver)


def received(args: dict[str, Any], version: str) -> dict[str, DeploymentInfo]:
    """Return what the controller receives for an application of this version."""
    found = {}
    for name, deployment in built(args).items():
        sent = get_deploy_args(
            name=name,
            replica_config=deployment._replica_config,
            deployment_config=deployment._deployment_config,
            version=version,
        )
        found[name] = deploy_args_to_deployment_info(**sent)
    return found


def of_serve(info: DeploymentInfo) -> DeploymentVersion:
    return DeploymentVersion(info.version, info.deployment_config, info.replica_config.ray_actor_options)


def consequences(path: str, value: object) -> tuple[set[str], set[str]]:
    """Return the deployments whose processes are replaced, and those whose processes are reconfigured."""
    before, after = received(ARGS, "one"), received(changed_args(ARGS, {path: value}), "two")
    pairs: dict[str, tuple[Any, Any]] = {
        name: (of_serve(before[name]), of_serve(after[name])) for name in before
    }
    return (
        {name for name, (old, new) in pairs.items() if old.requires_actor_restart(new)},
        {name for name, (old, new) in pairs.items() if old.requires_actor_reconfigure(new)},
    )


@pytest.mark.parametrize(
    ("path", "value", "replaced", "changed"),
    [
        # A new application version alone replaces nothing.
        ("models.0.name", "demo", set(), set()),
        ("models.0.scheduler", {"max_waiting": 9}, set(), {SCHEDULER}),
        ("gateway.keys", [{"tenant": "a", "key": "secret-of-a"}], set(), {GATEWAY}),
        # The scheduler applies the bounds of a pool.
        ("models.0.pools.0.autoscaling", {"min_replicas": 2, "max_replicas": 4}, set(), {SCHEDULER}),
        ("models.0.pools.0.engine", {"emulated": {"max_model_len": 2_048, "max_num_seqs": 3}}, {SHORT}, None),
        ("models.0.pools.1.resources", {"num_cpus": 3}, {LONG}, None),
    ],
)
def test_a_change_replaces_some_processes_and_reaches_others(
    path: str, value: object, replaced: set[str], changed: set[str] | None
) -> None:
    found_replaced, found_changed = consequences(path, value)
    assert found_replaced == replaced
    if changed is not None:
        assert found_changed == changed


def test_new_processes_start_with_the_deployed_settings() -> None:
    info: Any = received(changed_args(ARGS, {"models.0.scheduler": {"max_waiting": 9}}), "two")[SCHEDULER]
    assert info.deployment_config.user_config["max_waiting"] == 9
    assert info.replica_config.init_args[0].scheduler.max_waiting == 9
    assert info.version != "two"


def test_a_version_is_the_same_in_every_process_and_differs_with_any_value() -> None:
    assert version_of({"b": 1, "a": (1.5, None)}) == version_of({"a": [1.5, None], "b": 1})
    assert len({version_of(1), version_of(2), version_of("1"), version_of(1, None)}) == 4
