"""vLLM's own server with the demo model, for tests with real engines."""

import contextlib
from collections.abc import Iterator
from pathlib import Path

import pytest

from experiments.common.application import free_port
from experiments.common.vllm_server import Option, VllmServer, VllmServerSettings, started_vllm
from tests.e2e.served import ROOT

MODEL = "SmolLM2-135M-Instruct"
# Engines start in a minute each on an idle machine, and share two cores.
ENGINE_START_S = 420.0

needs_model = pytest.mark.skipif(
    not (ROOT / "models" / MODEL).is_dir(), reason="scripts/fetch_demo_model has not been run"
)


@contextlib.contextmanager
def vllm_server(log: Path, names: tuple[str, ...] = (MODEL,), **options: Option) -> Iterator[VllmServer]:
    """A server that answers, under these names and with these options of vLLM."""
    settings = VllmServerSettings(
        model=f"models/{MODEL}",
        served_model_names=names,
        options={"max_model_len": 8192, "dtype": "float32", "enforce_eager": True, **options},
        environment={"VLLM_CPU_KVCACHE_SPACE": "1", "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"},
    )
    with started_vllm(settings, free_port(), log) as server:
        server.wait_until_healthy()
        yield server
