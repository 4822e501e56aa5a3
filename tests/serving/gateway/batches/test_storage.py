"""Storage on a file system that hangs: a gateway still drains, closes and exits."""

import subprocess
import sys

import pytest

# Runs a gateway with batches until a request hangs in the file system; then it stops.
_PROGRAM = """
import asyncio, contextlib, sys, tempfile, time
from pathlib import Path

import openai

from serve_app.serving.gateway.batches.store import Contents
from serve_app.serving.gateway.batches.store import BatchStore
from tests.serving.gateway.batches.test_api import served

called = []

def hangs(*_, **__):
    called.append(1)
    time.sleep(1000)

async def main():
    setattr(*{"database": (BatchStore, "__init__"), "contents": (Contents, "create")}[sys.argv[1]], hangs)
    async with served(Path(tempfile.mkdtemp())) as (client, fleet):
        upload = asyncio.create_task(client.files.create(file=("input.jsonl", b"{}"), purpose="batch"))
        while not called:
            await asyncio.sleep(0.01)
        upload.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await upload
    print("stopped")

asyncio.run(main())
"""


@pytest.mark.parametrize("part", ["database", "contents"])
def test_a_gateway_exits_while_the_file_system_of_its_batches_hangs(part: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", _PROGRAM, part], capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.returncode, done.stdout) == (0, "stopped\n"), done.stderr
