"""Claims in Ray's store: two racing processes never get the same number."""

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from serve_app.serving.scheduler.actor import Incarnations

CLAIMS = """
import concurrent.futures, logging, sys
import ray
from serve_app.serving.scheduler.actor import GcsClaimStore, Incarnations

@ray.remote(num_cpus=0)
def claim(times):
    return [Incarnations(GcsClaimStore(), "app/m").claim() for _ in range(times)]

ray.init(
    address="local", num_cpus=2, include_dashboard=False, _temp_dir=sys.argv[1], logging_level=logging.ERROR
)
taken = sum(ray.get([claim.remote(10) for _ in range(3)]), [])
assert sorted(taken) == list(range(1, 31)), sorted(taken)
assert Incarnations(GcsClaimStore(), "app/m").newest() == 30
assert Incarnations(GcsClaimStore(), "app/other").claim() == 1
ray.shutdown()
"""


class Claims:
    """Claims in memory."""

    def __init__(self) -> None:
        self.claimed: list[str] = []

    def make(self, key: str) -> bool:
        self.claimed.append(key)
        return True

    def keys(self, prefix: str) -> list[str]:
        return [key for key in self.claimed if key.startswith(prefix)]


def test_models_whose_names_begin_alike_have_their_own_numbers() -> None:
    claims = Claims()
    longer = Incarnations(claims, "app/qwen/qwen3")
    assert [longer.claim(), longer.claim()] == [1, 2]
    assert [Incarnations(claims, "app/qwen").claim(), longer.claim()] == [1, 3]


@pytest.mark.slow  # starts its own Ray cluster
def test_claims_of_racing_processes_are_all_different() -> None:
    root = Path(__file__).resolve().parents[3]
    with tempfile.TemporaryDirectory(prefix="ray-", dir="/tmp", ignore_cleanup_errors=True) as folder:
        done = subprocess.run(
            [sys.executable, "-c", CLAIMS, folder],
            cwd=root,
            env={**os.environ, "PYTHONPATH": str(root), "RAY_TMPDIR": folder},
            capture_output=True,
            text=True,
            timeout=100,
            check=False,
        )
    assert done.returncode == 0, done.stderr[-3000:]
