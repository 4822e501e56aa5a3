"""Imports of the processes on the request path: none that cost memory or time."""

import subprocess
import sys

HEAVY = ("hyperopt", "kubernetes", "matplotlib", "openai", "pandas", "scipy", "sklearn", "torch", "vllm")


PARTS = ("gateway.deployment", "scheduler.actor", "pool", "remote.watcher")


def test_processes_on_the_way_of_requests_import_nothing_heavy() -> None:
    script = f"""
import importlib, sys
for part in {PARTS}:
    importlib.import_module(f"serve_app.serving.{{part}}")
    print(part, *sorted({set(HEAVY)} & set(sys.modules)))
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == list(PARTS)
