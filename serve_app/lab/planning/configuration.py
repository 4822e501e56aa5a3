"""Configuration of a planned fleet: a complete file, accepted by `check` and `simulate --config`."""

from typing import Any

import yaml

from serve_app.core import SchedulerSettings
from serve_app.core.settings_base import as_config
from serve_app.engines.model.profiles import load_profile
from serve_app.lab.planning.fleets import CostTable
from serve_app.lab.planning.plan import SizedFleet
from serve_app.lab.planning.verification import Workload
from serve_app.lab.simulation.scheduler_settings import set_path
from serve_app.lab.simulation.simulation import ReplicaPlan

# Ray's accelerator types of the GPUs in profile names.
_RAY_TYPES = {"a100": "A100", "h100": "H100", "h200": "H200", "l40s": "L40S", "l4": "L4", "b200": "B200"}

_HEADER = """\
# Planned for {rate:g} requests/s with a P99 TTFT of {ttft:g} s and a P99 TPOT of {tpot:g} ms.
# ${usd:,.2f} per hour, {gpus:,} GPUs.
# {engines}
"""
_EMULATED = "Engines are emulated with the profiles of the plan; `--model NAME` selects vLLM engines instead."
_VLLM = "Batch settings are those of the plan. Use `autoscaling` instead of `replicas` to follow the load."


def configuration(one: SizedFleet, demand: Workload, costs: CostTable, model: str | None = None) -> str:
    """Return the file, with vLLM engines of `model` (hub name or folder), or emulated ones without."""
    header = _HEADER.format(
        rate=demand.rate_per_s,
        ttft=demand.slo.ttft_s,
        tpot=1_000 * (demand.slo.tpot_s or 0),
        usd=one.usd_per_hour,
        gpus=one.gpus,
        engines=_EMULATED if model is None else _VLLM,
    )
    application = {
        "name": "ewsjf",
        "route_prefix": "/",
        "import_path": "serve_app.app:build_app",
        "args": {"models": [_model(one, demand, costs, model)], "gateways": {"replicas": 1, "num_cpus": 0.2}},
    }
    document = {
        "proxy_location": "Disabled",
        "http_options": {"host": "127.0.0.1", "port": 8000},
        "logging_config": {"enable_access_log": False},
        "applications": [application],
    }
    return header + yaml.safe_dump(document, sort_keys=False, width=110)


def _model(one: SizedFleet, demand: Workload, costs: CostTable, model: str | None) -> dict[str, Any]:
    plans = one.plan.settings(dict.fromkeys(one.plan.pools, 1)).plans(isolated=True)
    scheduler: dict[str, Any] = {"policy": demand.policy}
    for path, value in demand.scheduler.items():
        set_path(scheduler, path, value)
    if len(plans) > 1:
        set_path(scheduler, "routing.b_short_tokens", one.plan.b_short_tokens)
    return {
        "name": "planned" if model is None else model.rstrip("/").rpartition("/")[2],
        "pools": [_pool(one, plan, costs, model) for plan in plans],
        "scheduler": as_config(SchedulerSettings, scheduler),
    }


def _pool(one: SizedFleet, plan: ReplicaPlan, costs: CostTable, model: str | None) -> dict[str, Any]:
    profile, limits = one.plan.pools[plan.pool].profile, plan.engine
    usual = {"max_model_len": limits.max_model_len, "max_num_seqs": limits.max_num_seqs}
    batched = {
        "max_num_batched_tokens": limits.max_num_batched_tokens,
        "long_prefill_token_threshold": limits.long_prefill_token_threshold,
    }
    gpus = load_profile(profile).gpus
    engine: dict[str, Any]
    if model is None:
        engine = {"emulated": {"profile": profile, **usual, "advanced": batched}}
        resources: dict[str, Any] = {"num_cpus": 0.1}
    else:
        args = usual | batched | ({"tensor_parallel_size": gpus} if gpus > 1 else {})
        engine = {"vllm": {"model": model, "args": args}}
        kind = _RAY_TYPES.get(costs.gpu_of(profile))
        resources = {"num_cpus": 1.0, "num_gpus": gpus} | ({} if kind is None else {"accelerator_type": kind})
    pool = {
        "name": plan.pool,
        "engine": engine,
        "resources": resources,
        "replicas": one.counts[plan.pool],
    }
    return pool | {"advanced": {"cost": round(costs.usd_per_hour(profile), 4)}}
