"""Ray's own autoscaler on the rendered cluster: pods of the right group for every replica."""

from collections.abc import Mapping
from typing import Any

import pytest
from ray.autoscaler._private.kuberay.autoscaling_config import _derive_autoscaling_config_from_ray_cr
from ray.autoscaler.v2.instance_manager.config import AutoscalingConfig
from ray.autoscaler.v2.scheduler import ResourceDemandScheduler, SchedulingReply, SchedulingRequest
from ray.autoscaler.v2.utils import ResourceRequestUtil

from serve_app.settings.application import PoolSettings
from tests.chart.rendered import ON_RAY, Object, application, service_of


def read_by_ray(service: Object) -> dict[str, Any]:
    """Return the autoscaling configuration that Ray reads from KubeRay's RayCluster."""
    cluster = {
        "metadata": {"name": "ewsjf-abcde", "namespace": "llm"},
        "spec": service["spec"]["rayClusterConfig"],
    }
    return dict(_derive_autoscaling_config_from_ray_cr(cluster))


def demand(pool: PoolSettings) -> Mapping[str, float]:
    """Return the resources that Serve requests for one replica."""
    asked = pool.resources
    found = {"CPU": asked.num_cpus, "GPU": asked.num_gpus, **asked.custom}
    if asked.accelerator_type is not None:
        found[f"accelerator_type:{asked.accelerator_type}"] = 0.001
    return found


def plan(service: Object, demands: list[Mapping[str, float]]) -> SchedulingReply:
    """Return the pods that the autoscaler starts for these demands in an empty cluster."""
    config = AutoscalingConfig(read_by_ray(service), skip_content_hash=True)
    requests = [ResourceRequestUtil.make(dict(each)) for each in demands]
    return ResourceDemandScheduler().schedule(
        SchedulingRequest(
            disable_launch_config_check=True,
            node_type_configs=config.get_node_type_configs(),
            max_num_nodes=config.get_max_num_nodes(),
            resource_requests=ResourceRequestUtil.group_by_count(requests),
        )
    )


def started(reply: SchedulingReply) -> dict[str, int]:
    return {each.instance_type: each.count for each in reply.to_launch}


@pytest.mark.parametrize("example", ON_RAY)
def test_ray_reads_the_groups_as_the_values_have_them(example: str) -> None:
    service = service_of(example)
    found = read_by_ray(service)
    assert found["idle_timeout_minutes"] == 15
    assert found["available_node_types"]["headgroup"]["resources"]["GPU"] == 0
    groups = service["spec"]["rayClusterConfig"]["workerGroupSpecs"]
    assert {"headgroup", *(group["groupName"] for group in groups)} == set(found["available_node_types"])
    for group in groups:
        node = found["available_node_types"][group["groupName"]]
        assert (node["min_workers"], node["max_workers"]) == (group["minReplicas"], group["maxReplicas"])
        assert node["resources"][f"group_{group['groupName']}"] == 1000


@pytest.mark.parametrize("example", ON_RAY)
def test_there_are_pods_for_all_replicas_that_there_may_be(example: str) -> None:
    service = service_of(example)
    demands = [
        demand(pool)
        for pool in application(service).models[0].pools
        for _ in range(pool.autoscaling.max_replicas if pool.autoscaling else pool.replicas or 1)
    ]
    reply = plan(service, demands)
    assert reply.infeasible_resource_requests == []
    groups = service["spec"]["rayClusterConfig"]["workerGroupSpecs"]
    assert started(reply) == {group["groupName"]: group["maxReplicas"] for group in groups}


def test_each_pool_starts_pods_of_its_own_group() -> None:
    service = service_of("pool_groups")
    short, long = application(service).models[0].pools
    # Minimum replicas start in any case.
    assert started(plan(service, [demand(short)] * 5)) == {"short": 5, "long": 1}
    assert started(plan(service, [demand(long)] * 3)) == {"short": 2, "long": 3}


def test_a_replica_without_a_group_would_wait_for_ever() -> None:
    reply = plan(service_of("default"), [{"GPU": 1, "group_other": 0.001}])
    assert len(reply.infeasible_resource_requests) == 1
