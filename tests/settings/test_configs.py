"""The configurations that are shipped."""

from pathlib import Path

import pytest
import yaml
from ray.autoscaler._private.util import prepare_config, validate_config

from serve_app.request import PriorityClass
from serve_app.settings.loading import load_settings, settings_of

CONFIGS = Path(__file__).parents[2] / "configs"


@pytest.mark.parametrize("name", ["local", "cpu_vllm", "remote", "gpu_1x", "gpu_8x"])
def test_every_configuration_that_is_shipped_parses(name: str) -> None:
    assert list(load_settings(CONFIGS / f"{name}.yaml").served_names())


def test_the_kubernetes_service_parses_and_runs_with_the_settings_of_serve_env() -> None:
    spec = yaml.safe_load((CONFIGS / "kuberay.yaml").read_text())["spec"]
    ours = yaml.safe_load(spec["serveConfigV2"])["applications"][0]
    assert list(settings_of(ours["args"]).served_names())
    lines = (CONFIGS.parent / "serve_app" / "launch" / "serve.env").read_text().splitlines()
    expected = dict(line.split("=", 1) for line in lines if line and not line.startswith("#"))
    cluster = spec["rayClusterConfig"]
    for group in (cluster["headGroupSpec"], *cluster["workerGroupSpecs"]):
        container = group["template"]["spec"]["containers"][0]
        assert {entry["name"]: entry["value"] for entry in container["env"]} == expected


def test_the_cluster_launcher_takes_our_cluster() -> None:
    content = yaml.safe_load((CONFIGS.parent / "cluster.yaml").read_text())
    validate_config(prepare_config(content))
    assert set(content["available_node_types"]) == {"head", "gpu_worker"}
    # Ray's processes read serve_app/launch/serve.env when they start, on every node.
    for kind in ("head", "worker"):
        assert any(
            "serve_app/launch/serve.env" in command for command in content[f"{kind}_start_ray_commands"]
        )


def test_the_real_model_on_a_cpu_sends_three_thousand_tokens_to_the_long_pool() -> None:
    chosen = load_settings(CONFIGS / "cpu_vllm.yaml").models[0]
    assert [pool.engine.max_model_len for pool in chosen.pools] == [2_048, 8_192]
    assert chosen.scheduler.routing.b_short_tokens < 3_000
    assert chosen.scheduler.queue_timeout_s.of(PriorityClass.DEFAULT) >= 300


@pytest.mark.parametrize("name", ["cpu_vllm", "gpu_1x", "gpu_8x"])
def test_no_long_prompt_fills_the_iterations_of_a_real_engine(name: str) -> None:
    for model in load_settings(CONFIGS / f"{name}.yaml").models:
        for pool in model.pools:
            assert pool.engine.vllm is not None
            assert 0 < pool.engine.vllm.args["long_prefill_token_threshold"] <= 512, pool.name
