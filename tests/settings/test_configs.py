"""Shipped configurations; `tests/chart` compares the one for Kubernetes with the chart."""

import math
from pathlib import Path
from typing import Any

import pytest
import yaml

from serve_app.engines.model.roofline import kv_tokens, load_profile, step_time
from serve_app.request import PriorityClass
from serve_app.settings.application import ApplicationSettings, load_settings, settings_of
from serve_app.settings.checking import check_capacity, engine_setup

CONFIGS = Path(__file__).parents[2] / "configs"


def kuberay(kind: str, name: str = "ewsjf") -> dict[str, Any]:
    """Return one resource of the Kubernetes file."""
    resources = yaml.safe_load_all((CONFIGS / "kuberay.yaml").read_text())
    (found,) = (each for each in resources if each["kind"] == kind and each["metadata"]["name"] == name)
    return dict(found)


def test_kubernetes_budgets_select_the_pods_and_the_head_finds_its_redis() -> None:
    cluster = kuberay("RayService")["spec"]["rayClusterConfig"]
    groups = {"ewsjf-head": cluster["headGroupSpec"], "ewsjf-gpu": cluster["workerGroupSpecs"][0]}
    for name, group in groups.items():
        selected = kuberay("PodDisruptionBudget", name)["spec"]["selector"]["matchLabels"]
        assert selected.items() <= group["template"]["metadata"]["labels"].items()
    host, port = cluster["gcsFaultToleranceOptions"]["redisAddress"].split(":")
    service, redis = kuberay("Service", host)["spec"], kuberay("StatefulSet", host)["spec"]
    assert service["ports"] == [{"port": int(port)}]
    assert service["selector"] == redis["selector"]["matchLabels"] == redis["template"]["metadata"]["labels"]


def test_the_real_model_on_a_cpu_sends_three_thousand_tokens_to_the_long_pool() -> None:
    chosen = load_settings(CONFIGS / "cpu_vllm.yaml").models[0]
    assert [pool.engine.max_model_len for pool in chosen.pools] == [2_048, 8_192]
    assert chosen.scheduler.routing.b_short_tokens < 3_000
    assert chosen.scheduler.queue_timeout_s.of(PriorityClass.DEFAULT) >= 300


def test_no_long_prompt_fills_the_iterations_of_a_real_engine_without_a_gpu() -> None:
    for pool in load_settings(CONFIGS / "cpu_vllm.yaml").models[0].pools:
        assert pool.engine.vllm is not None
        assert 0 < pool.engine.vllm.args["long_prefill_token_threshold"] <= 512, pool.name


def on_gpus(name: str) -> ApplicationSettings:
    if name != "kuberay":
        return load_settings(CONFIGS / f"{name}.yaml")
    spec = kuberay("RayService")["spec"]
    return settings_of(yaml.safe_load(spec["serveConfigV2"])["applications"][0]["args"])


GPU_CONFIGS = [(name, card) for name in ("gpu_1x", "gpu_8x", "kuberay") for card in ("a100", "h100", "h200")]


@pytest.mark.parametrize(("name", "card"), GPU_CONFIGS)
def test_engines_on_gpus_start_and_reach_their_own_targets(name: str, card: str) -> None:
    settings = on_gpus(name)
    assert list(check_capacity(settings, card)) == []
    for pool in settings.models[0].pools:
        assert pool.engine.vllm is not None
        setup = engine_setup(pool.engine.vllm, card)
        assert setup is not None, "nothing would be checked"
        args = pool.engine.vllm.args
        # vLLM's defaults suit the card alone, and some of them take a tenth of the memory that is left here.
        assert args.keys() >= {"max_model_len", "max_num_seqs", "max_num_batched_tokens"}, pool.name
        assert math.ceil(pool.resources.num_gpus) == setup.tensor_parallel, pool.name
        # A tenth of slack, because the calculation does not include CUDA graphs.
        assert args["max_model_len"] <= 0.9 * kv_tokens(setup), pool.name


@pytest.mark.parametrize(("name", "card"), GPU_CONFIGS)
def test_chunks_of_long_prefills_are_what_a_card_computes_beside_decoding(name: str, card: str) -> None:
    for pool in on_gpus(name).models[0].pools:
        assert pool.engine.vllm is not None
        setup = engine_setup(pool.engine.vllm, card)
        assert setup is not None
        threshold = pool.engine.vllm.args["long_prefill_token_threshold"]
        chunk = step_time(setup).chunk_tokens()
        # The roofline's decode steps are up to half too short, see gpus.yaml, and so are its chunks.
        assert chunk <= threshold <= 2 * chunk + 64, (pool.name, chunk)
    assert load_profile("llama2-70b-h100-tp4").step_time.chunk_tokens() == 256, "measured"


def gpus_of(settings: ApplicationSettings) -> float:
    """Return the GPUs at the maximum number of replicas."""
    pools, budget = settings.models[0].pools, settings.models[0].gpu_budget
    wanted = sum(
        pool.resources.num_gpus * (pool.autoscaling.max_replicas if pool.autoscaling else pool.replicas or 1)
        for pool in pools
    )
    return wanted if budget is None else min(wanted, budget)


def test_all_replicas_fit_the_gpus_that_there_are() -> None:
    assert gpus_of(on_gpus("gpu_1x")) <= 1
    assert gpus_of(on_gpus("gpu_8x")) <= 8
    spec = kuberay("RayService")["spec"]
    (group,) = spec["rayClusterConfig"]["workerGroupSpecs"]
    (container,) = group["template"]["spec"]["containers"]
    workers = int(container["resources"]["requests"]["nvidia.com/gpu"]) * group["maxReplicas"]
    assert gpus_of(on_gpus("kuberay")) <= workers


def test_engines_that_start_together_on_one_card_do_not_measure_each_other() -> None:
    for pool in on_gpus("gpu_1x").models[0].pools:
        assert pool.engine.vllm is not None
        # vLLM counts other processes' changes of free memory as its own need, unless the cache size is given.
        assert pool.engine.vllm.args["kv_cache_memory_bytes"] > 0
