"""Imports of the processes on the request path: none that cost memory or time."""

import subprocess
import sys

HEAVY = (
    "hyperopt",
    "jwt",
    "kubernetes",
    "matplotlib",
    "openai",
    "pandas",
    "scipy",
    "sklearn",
    "torch",
    "vllm",
)


COMMANDS = ("check", "deploy", "status", "stop", "serve.command", "serve.host")
NEEDED_LATER = ("ray", "scipy", "sklearn", "torch", "vllm")
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


def test_commands_do_not_import_ray_before_they_know_its_token() -> None:
    """Ray reads the token of its cluster from the environment when it is imported, which takes seconds."""
    script = f"""
import importlib, sys
for name in {COMMANDS}:
    importlib.import_module(f"serve_app.cli.{{name}}")
print(*sorted({set(NEEDED_LATER)} & set(sys.modules)))
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.split() == []
