import os
import subprocess
import sys
import time
from dataclasses import replace

from experiments.common.processes import CpuMeter, is_alive, process_tree

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
        mine = {one.pid: one for one in process_tree(os.getpid())}
        assert mine[os.getpid()].cpu_s > 0
        busy = mine[parent.pid]
        assert busy.parent == os.getpid()
        assert busy.cpu_s >= 0.15
        assert busy.title == sys.executable
        (sleeper,) = [one for one in mine.values() if one.parent == parent.pid]
        assert process_tree(parent.pid)[1].pid == sleeper.pid
    finally:
        for one in process_tree(parent.pid)[::-1]:
            os.kill(one.pid, 9)
        parent.wait()
    time.sleep(0.05)
    assert process_tree(parent.pid) == []


def test_a_meter_takes_off_what_a_role_uses_when_idle() -> None:
    meter = CpuMeter((os.getpid(),), lambda process: "me" if process.pid == os.getpid() else "other")
    meter.idle_per_s = {"me": 0.05}
    before = meter.read()
    until = time.process_time() + 0.3
    while time.process_time() < until:
        pass
    used = meter.used_since(before, seconds=2.0)
    assert 0.15 <= used["me"] <= 0.5
    meter.calibrate(0.1)
    assert meter.idle_per_s["me"] < 5


def test_a_process_is_known_by_its_start_and_not_by_its_number_alone() -> None:
    (me,) = [one for one in process_tree(os.getpid()) if one.pid == os.getpid()]
    assert is_alive(me)
    assert not is_alive(replace(me, started=me.started + 1))
    assert not is_alive(replace(me, pid=2**22 + 1))
