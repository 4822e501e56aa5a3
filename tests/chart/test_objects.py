"""Rendered objects: valid in Kubernetes, and equal to the plain files in configs."""

import re
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

from serve_app.cli.serve.instance import default_settings
from serve_app.settings.checking import check_file
from tests.chart.rendered import (
    CHART,
    EXAMPLES,
    ON_RAY,
    Object,
    application,
    container,
    environment,
    groups,
    helm,
    install,
    only,
    render,
    service_of,
    values_of,
)
from tests.chart.schemas import KUBERNETES, check_object

ROOT = CHART.parents[1]
ALL = ("default", *EXAMPLES)
EVERYTHING: dict[str, Any] = {
    "image": {"tag": "1", "pullSecrets": [{"name": "registry"}]},
    "environment": [{"name": "HF_HUB_OFFLINE", "value": "1"}],
    "service": {"type": "LoadBalancer", "annotations": {"example.com/internal": "true"}},
    "head": {"tolerations": [{"operator": "Exists"}], "annotations": {"a": "b"}},
    "podSecurityContext": {"runAsNonRoot": True, "runAsUser": 1000},
    "discoverEndpoints": True,
    "networkPolicy": {"enabled": True, "clients": [{"namespaceSelector": {}}]},
    "gcsFaultTolerance": {"redis": {"storageClass": "fast"}},
    "metrics": {
        "application": {"enabled": True, "labels": {"release": "prometheus"}},
        "engines": {"enabled": True, "labels": {"release": "prometheus"}},
        "rules": {"enabled": True, "labels": {"release": "prometheus"}},
        "dashboard": {"enabled": True},
        "docsUrl": "https://example.com/docs",
    },
    "keda": {
        "enabled": True,
        "prometheusAddress": "http://prometheus:9090",
        "fleets": [{"model": "m/x", "pool": "short", "deployment": "vllm", "min": 0, "max": 2}],
    },
}
ONE_POD: dict[str, Any] = {
    "application": {
        "models": [{"name": "m", "pools": [{"engine": {"remote": {"endpoints": ["http://a:8000"]}}}]}]
    }
}


@pytest.mark.parametrize("example", ALL)
def test_the_linter_finds_nothing(example: str) -> None:
    report = helm().lint(CHART, values_of(example), strict=True)
    assert report["errors"] == []
    assert {message["error"] for message in report["messages"]} <= {"icon is recommended"}


@pytest.mark.parametrize("version", KUBERNETES)
@pytest.mark.parametrize("example", [*ALL, "everything", "everything in one pod"])
def test_kubernetes_takes_every_object(example: str, version: str) -> None:
    values = {"everything": EVERYTHING, "everything in one pod": EVERYTHING | ONE_POD}.get(example)
    objects = render(values_of(example) if values is None else values)
    kinds = {each["kind"] for each in objects}
    assert "PodDisruptionBudget" in kinds
    assert len({"RayService", "Deployment"} & kinds) == 1
    for each in objects:
        check_object(each, version)
    names = [(each["kind"], each["metadata"]["name"]) for each in objects]
    assert len(set(names)) == len(names)


def test_every_optional_object_is_rendered_on_request() -> None:
    assert {each["kind"] for each in render(EVERYTHING)} == {
        *("RayService", "StatefulSet", "Service", "PodDisruptionBudget", "NetworkPolicy", "ConfigMap"),
        *("ServiceAccount", "Role", "RoleBinding", "ScrapeConfig", "PrometheusRule"),
        "ScaledObject",
    }
    assert {each["kind"] for each in render(EVERYTHING | ONE_POD)} == {
        *("Deployment", "Service", "PodDisruptionBudget", "NetworkPolicy", "ConfigMap"),
        *("ServiceAccount", "Role", "RoleBinding", "ScrapeConfig", "PrometheusRule"),
        "ScaledObject",
    }


def test_a_field_unknown_to_kubernetes_is_detected() -> None:
    service = service_of("default")
    container(next(groups(service)))["lifecycle"]["preStop"]["exce"] = {}
    with pytest.raises(Exception, match="exce"):
        check_object(service, KUBERNETES[-1])
    service = service_of("default")
    service["spec"]["rayClusterConfig"]["workerGroupSpecs"][0]["minReplica"] = 1
    with pytest.raises(Exception, match="minReplica"):
        check_object(service, KUBERNETES[-1])


@pytest.mark.parametrize("example", ALL)
def test_the_configuration_that_is_deployed_passes_our_own_check(example: str, tmp_path: Path) -> None:
    path = tmp_path / "serve.yaml"
    objects = render(values_of(example))
    path.write_text(
        only(objects, "RayService")["spec"]["serveConfigV2"]
        if example in ON_RAY
        else only(objects, "ConfigMap", "ewsjf")["data"]["config.yaml"]
    )
    checked = check_file(path, on_this_machine=False, gpu="h100")
    assert checked.mistakes == []
    assert checked.settings is not None


def _without_labels(group: Object) -> Object:
    """Return a group without the chart's additions to the plain file: labels and pool resources."""
    template = {"spec": group["template"]["spec"]}
    parameters = {key: value for key, value in group["rayStartParams"].items() if key != "resources"}
    (found,) = template["spec"]["containers"]
    found = {**found, "env": environment(group)}
    for key in ("image", "imagePullPolicy"):
        found.pop(key, None)
    quantities = {kind: {k: str(v) for k, v in of.items()} for kind, of in found["resources"].items()}
    template = {"spec": {**template["spec"], "containers": [{**found, "resources": quantities}]}}
    return {**group, "template": template, "rayStartParams": parameters}


def test_the_default_values_are_the_service_of_the_plain_file() -> None:
    plain = only(list(yaml.safe_load_all((ROOT / "configs/kuberay.yaml").read_text())), "RayService")
    made = service_of("default")
    assert application(made) == application(plain)
    serve = [yaml.safe_load(each["spec"].pop("serveConfigV2")) for each in (made, plain)]
    for config in serve:
        del config["applications"][0]["args"]
    assert serve[0] == serve[1]
    for each in (made, plain):
        cluster = each["spec"]["rayClusterConfig"]
        cluster["headGroupSpec"] = _without_labels(cluster["headGroupSpec"])
        cluster["workerGroupSpecs"] = [_without_labels(group) for group in cluster["workerGroupSpecs"]]
    assert made["spec"] == plain["spec"]


def test_large_numbers_stay_numbers() -> None:
    pools = yaml.safe_load((ROOT / "configs/gpu_1x.yaml").read_text())["applications"][0]["args"]
    values = {"application": pools, "workers": [{**WORKERS, "gpus": 1}]}
    service = only(render(values), "RayService")
    chosen = application(service).models[0].pools[0].engine.vllm
    assert chosen is not None
    assert chosen.args["kv_cache_memory_bytes"] == 15_000_000_000


WORKERS = {"name": "gpu", "cpus": 8, "memory": "64Gi", "min": 1, "max": 1}


@pytest.mark.parametrize("example", ON_RAY)
def test_every_pod_runs_with_the_settings_of_serve_env(example: str) -> None:
    for group in groups(service_of(example)):
        found = environment(group)
        del found["RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S"]
        assert found == default_settings()


@pytest.mark.parametrize("example", ON_RAY)
def test_a_pod_that_must_go_gets_the_time_of_its_open_answers(example: str) -> None:
    service = service_of(example)
    settings = application(service)
    gateways_s = settings.gateways.drain_timeout_s
    drain_s = max(gateways_s, *(pool.drain_timeout_s for model in settings.models for pool in model.pools))
    for group in groups(service):
        found = environment(group)
        ray_s = float(found["RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S"])
        # The engine ends after the last answer, and before Ray ends it.
        assert ray_s >= drain_s + 30
        hook_s = 0.0
        if "lifecycle" in container(group):
            command = container(group)["lifecycle"]["preStop"]["exec"]["command"]
            hook_s = float(command[-1])
            assert hook_s == gateways_s
        assert group["template"]["spec"]["terminationGracePeriodSeconds"] >= hook_s + ray_s + 30


def test_the_longest_drain_of_a_pool_is_that_of_every_pod() -> None:
    assert (
        environment(next(groups(service_of("pool_groups"))))["RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S"]
        == "1830"
    )


def _labels(group: Object) -> set[tuple[str, str]]:
    return set(group["template"]["metadata"]["labels"].items())


@pytest.mark.parametrize("example", ON_RAY)
def test_budgets_and_policies_select_pods_that_are_there(example: str) -> None:
    objects = render({**values_of(example), "networkPolicy": {"enabled": True}})
    service = only(objects, "RayService")
    head, *workers = groups(service)
    wanted = {"head": head, **{group["groupName"]: group for group in workers}}
    budgets = [each for each in objects if each["kind"] == "PodDisruptionBudget"]
    assert len(budgets) == len(wanted)
    for name, group in wanted.items():
        selector = set(
            only(budgets, "PodDisruptionBudget", f"-{name}")["spec"]["selector"]["matchLabels"].items()
        )
        chosen = [other for other, each in wanted.items() if selector <= _labels(each)]
        assert selector <= _labels(group)
        assert chosen == [name]
    policy = only(objects, "NetworkPolicy", "ewsjf")["spec"]
    assert all(
        set(policy["podSelector"]["matchLabels"].items()) <= _labels(group) for group in wanted.values()
    )


def test_the_head_finds_the_redis_that_is_made_and_the_one_that_is_given() -> None:
    objects = render({})
    options = only(objects, "RayService")["spec"]["rayClusterConfig"]["gcsFaultToleranceOptions"]
    host, port = options["redisAddress"].split(":")
    service, redis = only(objects, "Service", host)["spec"], only(objects, "StatefulSet", host)["spec"]
    assert service["ports"] == [{"port": int(port)}]
    assert service["selector"] == redis["selector"]["matchLabels"] == redis["template"]["metadata"]["labels"]
    (secret,) = redis["template"]["spec"]["containers"][0]["env"]
    assert secret["valueFrom"] == options["redisPassword"]["valueFrom"]
    objects = render({"gcsFaultTolerance": {"redisAddress": "redis.example:6380"}})
    options = only(objects, "RayService")["spec"]["rayClusterConfig"]["gcsFaultToleranceOptions"]
    assert options["redisAddress"] == "redis.example:6380"
    assert not {"StatefulSet", "Service"} & {each["kind"] for each in objects}
    objects = render({"gcsFaultTolerance": {"enabled": False}})
    assert "gcsFaultToleranceOptions" not in only(objects, "RayService")["spec"]["rayClusterConfig"]


def _pods(objects: list[Object]) -> list[Object]:
    """Return the specifications of the pods that run this project."""
    deployed = [each for each in objects if each["kind"] == "Deployment"]
    groups_of = [group for each in objects if each["kind"] == "RayService" for group in groups(each)]
    return [each["template"]["spec"] for each in (*groups_of, *(each["spec"] for each in deployed))]


@pytest.mark.parametrize("mode", ["standalone", "rayservice"])
def test_pods_may_discover_endpoints_if_enabled(mode: str) -> None:
    objects = render({**values_of("servers_outside"), "mode": mode})
    account, role = only(objects, "ServiceAccount"), only(objects, "Role")
    binding = only(objects, "RoleBinding")
    assert {each["serviceAccountName"] for each in _pods(objects)} == {account["metadata"]["name"]}
    assert binding["subjects"][0]["name"] == account["metadata"]["name"]
    assert binding["roleRef"]["name"] == role["metadata"]["name"]
    assert role["rules"] == only(standalone_file(), "Role")["rules"]
    assert {(*rule["apiGroups"], *rule["resources"], *rule["verbs"]) for rule in role["rules"]} == {
        ("discovery.k8s.io", "endpointslices", "get", "list", "watch"),
        ("inference.networking.k8s.io", "inferencepools", "get", "list", "watch"),
        ("inference.networking.x-k8s.io", "inferenceobjectives", "get", "list", "watch"),
        ("", "pods", "get", "list", "watch"),
    }


def standalone_file() -> list[Object]:
    """Return the objects of the plain file for one pod."""
    return list(yaml.safe_load_all((ROOT / "configs/kubernetes/standalone.yaml").read_text()))


@pytest.mark.parametrize("version", KUBERNETES)
def test_kubernetes_takes_every_object_of_the_plain_file(version: str) -> None:
    for each in standalone_file():
        check_object(each, version)


def test_one_pod_of_the_chart_is_that_of_the_plain_file() -> None:
    plain = standalone_file()
    config = only(plain, "ConfigMap")["data"]["config.yaml"]
    args = yaml.safe_load(config)["applications"][0]["args"]
    gateways = {**args["gateways"], "advanced": None}
    values = {
        "application": {**args, "gateways": gateways},
        "head": {"cpus": 2, "memory": "4Gi"},
        "discoverEndpoints": True,
        "image": {"tag": "latest"},
    }
    made = render(values)
    assert yaml.safe_load(only(made, "ConfigMap")["data"]["config.yaml"]) == yaml.safe_load(config)
    found, wanted = only(made, "Deployment")["spec"], only(plain, "Deployment")["spec"]
    for key in ("replicas", "strategy"):
        assert found[key] == wanted[key]
    pod = found["template"]["spec"]
    assert pod["containers"][0].pop("imagePullPolicy") == "IfNotPresent"
    assert pod == wanted["template"]["spec"]
    ports = [only(each, "Service")["spec"]["ports"] for each in (made, plain)]
    assert ports[0] == ports[1]


def test_the_service_and_the_budget_select_the_only_pod() -> None:
    for objects in (render(ONE_POD), standalone_file()):
        deployment = only(objects, "Deployment")["spec"]
        labels = deployment["template"]["metadata"]["labels"].items()
        budget = only(objects, "PodDisruptionBudget")["spec"]
        for selected in (
            deployment["selector"]["matchLabels"],
            budget["selector"]["matchLabels"],
            only(objects, "Service")["spec"]["selector"],
        ):
            assert selected
            assert selected.items() <= labels
        assert budget["maxUnavailable"] == 0


def test_only_the_port_of_the_only_pod_can_be_reached() -> None:
    policy = only(render(ONE_POD | {"networkPolicy": {"enabled": True}}), "NetworkPolicy")["spec"]
    assert policy["ingress"] == [{"ports": [{"port": 8000}]}]


def test_the_only_pod_has_time_for_its_open_answers() -> None:
    application = ONE_POD["application"] | {"gateways": {"drain_timeout_s": 1200.5}}
    (pod,) = _pods(render({"application": application}))
    hook_s = float(pod["containers"][0]["lifecycle"]["preStop"]["exec"]["command"][-1])
    assert pod["terminationGracePeriodSeconds"] >= 1200.5 + hook_s + 30


def test_a_changed_configuration_of_the_only_pod_replaces_it() -> None:
    changed = [
        only(render(ONE_POD | {"service": {"port": port}}), "Deployment")["spec"]["template"]["metadata"]
        for port in (8000, 8001)
    ]
    assert changed[0] != changed[1]


@pytest.mark.parametrize("name", ["a", "a-release-of-a-long-name-of-53-letters-that-helm-takes-x"[:53]])
def test_names_leave_room_for_what_kuberay_appends(name: str) -> None:
    objects = render(EVERYTHING, name)
    # KubeRay rejects longer names.
    assert len(only(objects, "RayService")["metadata"]["name"]) <= 47
    for each in objects:
        assert re.fullmatch(r"[a-z0-9]([a-z0-9.-]*[a-z0-9])?", each["metadata"]["name"])
        assert len(each["metadata"]["name"]) <= 63


def test_the_chart_is_of_this_release() -> None:
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text())
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert chart["appVersion"] == chart["version"] == project["version"]
    values = yaml.safe_load((CHART / "values.yaml").read_text())
    assert f"ray=={values['rayVersion']}" in (ROOT / "constraints.txt").read_text().splitlines()


def test_the_notes_name_the_installed_objects() -> None:
    notes = str(install(values_of("pool_groups"))["notes"])
    assert "2 to 8 of short, 1 to 4 of long" in notes
    assert "ewsjf-serve-svc" in notes
    assert "ewsjf-api-keys" in notes
    assert "loss of the head" not in notes
    assert "loss of the head" in str(install({"gcsFaultTolerance": {"enabled": False}})["notes"])
    notes = str(install(ONE_POD)["notes"])
    assert "rollout status deployment/ewsjf" in notes
    assert "port-forward service/ewsjf 8000" in notes
    assert "ewsjf-redis" not in notes
