"""Values of the chart that are rejected, with their messages."""

from typing import Any

import jsonschema  # type: ignore[import-untyped]
import pytest
import yaml

from docs_reference.chart import SCHEMA
from tests.chart.rendered import CHART, EXAMPLES, helm, render

CONFIGS = CHART.parent


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"wrokers": []}, "wrokers"),
        ({"head": {"memmory": "1Gi"}}, "memmory"),
        ({"head": {"cpus": "8"}}, "/head/cpus"),
        ({"workers": [{"name": "gpu", "cpus": 1, "memory": "1Gi", "min": 0}]}, "missing property 'max'"),
        ({"workers": [{"name": "GPU", "cpus": 1, "memory": "1Gi", "min": 0, "max": 1}]}, "/workers/0/name"),
        ({"service": {"type": "Loadbalancer"}}, "/service/type"),
        ({"metrics": {"application": {"interval": "15"}}}, "/metrics/application/interval"),
        ({"keda": {"enabled": True, "prometheusAddress": "prometheus:9090"}}, "prometheusAddress"),
        ({"application": {"gatewys": {"replicas": 2}}}, "gatewys"),
        ({"application": {"models": [{"name": "m", "pols": []}]}}, "pols"),
        ({"application": {"models": [{"name": "m", "pools": [{"engine": {"vlm": {}}}]}]}}, "vlm"),
        (
            {"application": {"models": [{"name": "m", "scheduler": {"advanced": {"unheard_of": 1}}}]}},
            "unheard_of",
        ),
    ],
)
def test_a_typo_is_rejected_by_its_name(values: dict[str, Any], words: str) -> None:
    with pytest.raises(helm().HelmError, match=words):
        render(values)


def test_arguments_of_engines_are_left_to_the_engine() -> None:
    pool = {"name": "only", "engine": {"vllm": {"model": "m", "args": {"anything": {"at": "all"}}}}}
    assert render({"application": {"models": [{"name": "m", "pools": [pool]}]}})


@pytest.mark.parametrize("name", ["local", "timed_vllm", "cpu_vllm", "gpu_1x", "gpu_8x", "remote"])
def test_every_configuration_is_a_valid_application(name: str) -> None:
    content = yaml.safe_load((CONFIGS / f"{name}.yaml").read_text())
    values = {"application": content["applications"][0]["args"]}
    jsonschema.validate(values, yaml.safe_load(SCHEMA.read_text()))


def test_default_values_and_examples_are_valid_without_helm_too() -> None:
    schema = yaml.safe_load(SCHEMA.read_text())
    for path in (CHART / "values.yaml", *EXAMPLES.values()):
        jsonschema.validate(yaml.safe_load(path.read_text()), schema)


def _pool(**resources: Any) -> dict[str, Any]:
    pool = {"name": "short", "engine": {"vllm": {"model": "m"}}, "resources": resources}
    return {"application": {"models": [{"name": "m", "pools": [pool]}]}}


@pytest.mark.parametrize(
    ("resources", "words"),
    [
        ({"num_gpus": 16}, "16 GPUs"),
        ({"num_gpus": 1, "num_cpus": 65}, "65 CPUs"),
        ({"num_gpus": 1, "custom": {"group_gpus": 0.001}}, "with group_gpus"),
        ({"num_gpus": 1, "accelerator_type": "H100"}, "with accelerator_type:H100"),
    ],
)
def test_a_pool_that_no_node_can_hold_is_rejected(resources: dict[str, Any], words: str) -> None:
    with pytest.raises(helm().HelmError, match=rf"pool short of m: no group of workers .*{words}"):
        render(_pool(**resources))


def test_pools_that_nodes_can_hold_are_not_rejected() -> None:
    assert render(_pool(num_gpus=8, num_cpus=64, custom={"group_gpu": 0.001}))
    assert render({**_pool(num_cpus=2), "workers": []}), "an engine on the head's CPUs"


def test_engines_on_gpus_do_not_run_in_one_pod() -> None:
    with pytest.raises(helm().HelmError, match=r"pool short of m runs vLLM.*set mode to rayservice"):
        render({**_pool(num_gpus=1), "mode": "standalone"})
