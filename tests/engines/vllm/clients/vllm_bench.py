"""vLLM's own load generator, `vllm bench serve`."""

import asyncio
import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

from serve_app.errors import Outcome
from serve_app.lab.calibration import Measurements, read_measurements
from tests.engines.vllm.clients.harness import KEY, MODEL, Checks, ClientHarness
from tests.engines.vllm.real import TINY

PROMPTS, PROMPT_TOKENS, OUTPUT_TOKENS = 6, 24, 8


async def streams(at: ClientHarness) -> None:
    before = at.first_tokens()
    found, measurements = await bench(at, "openai-chat", "/v1/chat/completions")
    assert (found["completed"], found["failed"]) == (PROMPTS, 0)
    assert found["total_output_tokens"] == PROMPTS * OUTPUT_TOKENS
    assert found["mean_ttft_ms"] > 0
    # `calibrate` reads its result.
    assert [one.output_tokens for one in measurements.requests] == [OUTPUT_TOKENS] * PROMPTS
    assert measurements.of_client
    # It sends one more request before the measurement, to check that the server is ready.
    assert at.first_tokens() - before >= PROMPTS
    counted = [usage.output_tokens for _, outcome, usage in ended(at) if outcome is Outcome.COMPLETED]
    assert counted[-PROMPTS:] == [OUTPUT_TOKENS] * PROMPTS


def ended(at: ClientHarness) -> list[tuple[Any, ...]]:
    return [event for event in at.dispatcher.events if event[0] == "finished"]


async def bench(at: ClientHarness, backend: str, endpoint: str) -> tuple[Any, Measurements]:
    """Return the result file, and as `calibrate` reads it; print the log if the command fails."""
    with tempfile.TemporaryDirectory() as folder:
        options = {
            "backend": backend,
            "endpoint": endpoint,
            "base-url": at.url,
            "model": MODEL,
            "tokenizer": str(TINY),
            "dataset-name": "random",
            "random-input-len": PROMPT_TOKENS,
            "random-output-len": OUTPUT_TOKENS,
            "num-prompts": PROMPTS,
            "result-dir": folder,
            "result-filename": "result.json",
        }
        words = [f"--{name}={value}" for name, value in options.items()]
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "vllm.entrypoints.cli.main", "bench", "serve"),
            *(*words, "--ignore-eos", "--save-result", "--save-detailed", "--disable-tqdm"),
            env={**os.environ, "OPENAI_API_KEY": KEY, "HF_HUB_OFFLINE": "1"},
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
        )
        output, _ = await process.communicate()
        assert process.returncode == 0, output.decode()
        result = Path(folder) / "result.json"
        return json.loads(result.read_text()), read_measurements(result)


CHECKS: Checks = {("`vllm bench serve`", "streams"): streams}
