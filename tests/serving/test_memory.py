"""Memory tuning of serving processes; in its own process, because it is permanent."""

import json
import subprocess
import sys

_SCRIPT = """
import gc, json, resource
from serve_app.serving.process import tune_memory

def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(200):
        # As a long body in three stages: longer than what glibc takes from its heap by default.
        kept = [bytes(1_000_000), bytes(1_000_000), bytes(1_000_000)]
        del kept
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

before = faults()
tune_memory()
faults()
after = faults()
print(json.dumps({"before": before, "after": after, "frozen": gc.get_freeze_count(),
    "young": gc.get_threshold()[0]}))
"""


def test_a_process_retains_the_memory_of_long_bodies_and_collects_garbage_less_often() -> None:
    done = subprocess.run([sys.executable, "-c", _SCRIPT], capture_output=True, text=True, check=True)
    found = json.loads(done.stdout)
    assert found["frozen"] > 1_000
    assert found["young"] > 700
    if sys.platform == "linux":
        # Without tuning, pages are returned and faulted in again each time.
        assert found["after"] * 5 < found["before"]
