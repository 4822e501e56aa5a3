"""Idle footprint of the quick start: time to start, memory, processes, CPU."""

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import psutil
import yaml

from experiments.common.application import served_application
from experiments.common.processes import CpuMeter, calibrate, process_tree, role_of
from experiments.overhead.system import QuickStartSettings

_CONFIG = Path(__file__).resolve().parents[2] / "configs" / "local.yaml"


def quick_start_figures(settings: QuickStartSettings) -> dict[str, Any]:
    """Return lists with one value for each start, by role where it is known."""
    starts = [_start(settings) for _ in range(settings.starts)]
    return {
        "start_s": [one["start_s"] for one in starts],
        "processes": [one["processes"] for one in starts],
        "memory_mb": _by_role([one["memory_mb"] for one in starts]),
        "idle_cores": _by_role([one["idle_cores"] for one in starts]),
    }


def _start(settings: QuickStartSettings) -> dict[str, Any]:
    config = yaml.safe_load(_CONFIG.read_text(encoding="utf-8"))
    began = time.monotonic()
    with served_application(config) as served:
        start_s = time.monotonic() - began
        time.sleep(settings.settle_s)
        meter = CpuMeter((served.pid,))
        calibrate([meter], settings.idle_s)
        memory: dict[str, float] = {}
        family = process_tree(served.pid)
        for process in family:
            role = role_of(process)
            memory[role] = memory.get(role, 0.0) + _pss_mb(process)
    return {
        "start_s": start_s,
        "processes": len(family),
        "memory_mb": memory,
        "idle_cores": dict(meter.idle_per_s),
    }


def _pss_mb(process: psutil.Process) -> float:
    """Return the process's own memory plus its share of shared memory; 0 if it has ended."""
    try:
        return float(process.memory_full_info().pss) / 2**20
    except psutil.NoSuchProcess:
        return 0.0


def _by_role(starts: Sequence[dict[str, float]]) -> dict[str, list[float]]:
    roles = sorted({role for one in starts for role in one})
    return {role: [one.get(role, 0.0) for one in starts] for role in roles}
