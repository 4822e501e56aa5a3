"""Imports of the processes on the request path: none that cost memory or time."""

import subprocess
import sys

import pytest

HEAVY = ("hyperopt", "kubernetes", "matplotlib", "openai", "pandas", "scipy", "sklearn", "torch", "vllm")


@pytest.mark.parametrize("part", ["gateway", "scheduler", "pool", "remote"])
def test_a_process_on_the_way_of_requests_imports_nothing_heavy(part: str) -> None:
    script = (
        f"import sys, serve_app.serving.{part}.deployment\n"
        f"print(*({set(HEAVY)!r} & set(sys.modules)), sep=' ')"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.split() == []
