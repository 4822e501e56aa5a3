"""Every alert on its own series, with promtool: values that fire it, and values that do not.

tests/e2e/test_alerts.py fires the alerts that a fault of a live application can fire within minutes.
"""

import subprocess
from dataclasses import dataclass
from pathlib import Path

import pytest
import yaml

from observability.files import OBSERVABILITY
from tests.observability.prometheus import program, rules

ENDED = "ewsjf_gateway_requests_total"
OVERHEAD = "ewsjf_overhead_seconds_bucket"
ONE_BY_ONE, STEADY = "0+1x400", "0+100x400"


@dataclass(frozen=True)
class Case:
    """Series with one-minute steps, and the time of evaluation.

    Attributes:
        fault, order: series with which the alert fires, and series with which it does not.
    """

    fault: dict[str, str]
    order: dict[str, str]
    at: str = "2h"


def ended(outcome: str, values: str) -> dict[str, str]:
    """Return requests of an outcome, beside a hundred per minute that complete."""
    labels = 'model="m",class="default"'
    return {
        f'{ENDED}{{{labels},outcome="completed"}}': STEADY,
        f'{ENDED}{{{labels},outcome="{outcome}"}}': values,
    }


def targets(good: str) -> dict[str, str]:
    """Return a hundred judged requests per minute, with this many good ones."""
    labels = '{model="m",class="default"}'
    return {
        f"ewsjf_gateway_slo_requests_total{labels}": STEADY,
        f"ewsjf_gateway_slo_attained_requests_total{labels}": good,
    }


def overhead(slow: str) -> dict[str, str]:
    """Return a hundred requests per minute within 5 ms, plus this many slow ones."""
    found = {f'{OVERHEAD}{{stage="schedule",le="{bound}"}}': STEADY for bound in ("0.005", "0.1")}
    sums = {"0": STEADY, "5": "0+105x400"}[slow]
    return found | {f'{OVERHEAD}{{stage="schedule",le="{bound}"}}': sums for bound in ("2.5", "+Inf")}


def gauge(name: str, labels: str, fault: str, order: str, at: str = "2h") -> Case:
    """Return a case with one series."""
    return Case({f"{name}{{{labels}}}": fault}, {f"{name}{{{labels}}}": order}, at)


CASES = {
    "NoMetrics": Case({"up": "0x400"}, {'ewsjf_gateways_connected{model="m"}': "1x400"}),
    "NoReplica": Case(ended("rejected_no_replica", ONE_BY_ONE), ended("rejected_no_replica", "7x400")),
    "EnginesFail": Case(ended("failed", "0+2x400"), ended("failed", "0+0.5x400")),
    "OverCapacity": Case(ended("rejected_queue_full", "0+10x400"), ended("rejected_queue_full", ONE_BY_ONE)),
    "DeadlinesMissed": Case(ended("expired", "0+2x400"), ended("expired", "0+0.5x400")),
    # Ten minutes of misses in an otherwise good hour do not fire.
    "TargetsMissed": Case(targets("0+85x400"), targets("0+100x115 11500+80x10")),
    "PoolSaturated": gauge("ewsjf_pool_saturation_ratio", 'model="m",pool="p"', "1x400", "1x100 0.5x10 1x5"),
    "RequestsWaitLong": gauge(
        "ewsjf_length_queue_oldest_wait_seconds", 'model="m",class="interactive"', "40x400", "20x400"
    ),
    "StaleReplicas": gauge("ewsjf_replicas_stale", 'model="m"', "1x400", "0x400"),
    "EndpointDown": gauge("ewsjf_endpoints", 'model="m",pool="p",state="down"', "1x400", "0x400"),
    "ReplicasLost": gauge("ewsjf_put_backs_total", 'model="m",failure="lost"', ONE_BY_ONE, "0+0.1x400"),
    "Preemptions": gauge("vllm:num_preemptions_total", 'model="m",pool="p"', "0+10x400", ONE_BY_ONE),
    "SlowApplication": Case(overhead("5"), overhead("0")),
    "SchedulerFault": gauge("ewsjf_scheduler_errors_total", 'model="m"', "0x115 1x400", "3x400"),
    "SchedulerRestarts": gauge(
        "ewsjf_scheduler_incarnation", 'model="m"', "1x100 2 3 4 5 6x400", "1x100 2x400"
    ),
    "ScalingFails": gauge("ewsjf_scaling_failures_total", 'model="m"', "0x115 1x400", "3x400"),
    "StateNotSaved": gauge("ewsjf_state_saved_timestamp_seconds", 'model="m"', "60x400", "0+60x400"),
    "TwinError": gauge("ewsjf_twin_error_ratio", 'model="m",latency="ttft"', "-0.6x400", "0.3x400"),
    "MixedVersions": Case(
        {f'ewsjf_build_info{{version="{version}",commit=""}}': "1x400" for version in (1, 2)},
        {f'ewsjf_build_info{{version="1",commit="",gateway="{number}"}}': "1x400" for number in (1, 2)},
    ),
}


def test_every_alert_has_a_case() -> None:
    assert list(CASES) == [rule["alert"] for rule in rules()]


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("faulty", [True, False], ids=["fault", "in order"])
def test_an_alert_fires_on_its_fault_alone(name: str, faulty: bool, tmp_path: Path) -> None:
    case = CASES[name]
    series = case.fault if faulty else case.order
    expression = f'count(ALERTS{{alertname="{name}",alertstate="firing"}}) > 0'
    check = {"expr": expression, "eval_time": case.at, "exp_samples": [{"labels": "{}", "value": 1}]}
    if not faulty:
        check["exp_samples"] = []
    test = {
        "rule_files": [str(OBSERVABILITY / "alerts.yaml")],
        "evaluation_interval": "1m",
        "tests": [
            {
                "interval": "1m",
                "input_series": [{"series": each, "values": values} for each, values in series.items()],
                "promql_expr_test": [check],
            }
        ],
    }
    (tmp_path / "test.yaml").write_text(yaml.safe_dump(test))
    command = (program("promtool"), "test", "rules", str(tmp_path / "test.yaml"))
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
