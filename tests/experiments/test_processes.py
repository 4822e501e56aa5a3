import os
import subprocess
import sys
import time

import pytest

from experiments.common.processes import CpuMeter, calibrate, cpu_s, process_tree, role_of_title

BUSY = """
import subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
until = time.process_time() + 0.2
while time.process_time() < until: pass
print("done", flush=True)
time.sleep(60)
"""


def test_the_cpu_time_of_a_process_and_its_descendants_is_counted() -> None:
    parent = subprocess.Popen([sys.executable, "-c", BUSY], stdout=subprocess.PIPE)
    try:
        assert parent.stdout is not None
        parent.stdout.readline()
        busy, sleeper = process_tree(parent.pid)
        assert cpu_s([busy]) >= 0.15
        assert sleeper.ppid() == parent.pid
        assert cpu_s([busy, sleeper]) == pytest.approx(cpu_s([busy]), abs=0.1)
    finally:
        for one in process_tree(parent.pid)[::-1]:
            one.kill()
        parent.wait()
    assert process_tree(parent.pid) == []
    assert cpu_s([busy]) == 0


def test_a_meter_takes_off_what_a_role_uses_when_idle() -> None:
    meter = CpuMeter((os.getpid(),), lambda process: "me" if process.pid == os.getpid() else "other")
    meter.idle_per_s = {"me": 0.05}
    before = meter.read()
    until = time.process_time() + 0.3
    while time.process_time() < until:
        pass
    used = meter.used_since(before, seconds=2.0)
    assert 0.15 <= used["me"] <= 0.5
    calibrate([meter], 0.1)
    assert meter.idle_per_s["me"] < 5


@pytest.mark.parametrize(
    ("title", "role"),
    [
        ("ray::ServeReplica:app:gateway", "gateway"),
        ("ray::ServeReplica:app:scheduler-m", "scheduler"),
        ("ray::ServeReplica:app:tuner-m", "tuner"),
        ("ray::ServeReplica:app:pool-m-all", "engine"),
        ("ray::ServeController", "serve"),
        ("raylet", "ray"),
    ],
)
def test_a_process_is_known_by_the_part_that_it_plays(title: str, role: str) -> None:
    assert role_of_title(title) == role
