"""Environment that Ray's processes inherit, and the folder of an instance."""

import os
import shlex
from collections.abc import Mapping
from pathlib import Path

_SETTINGS = Path(__file__).with_name("serve.env")


def instances_folder() -> Path:
    """Return the folder of this user's instances.

    `tempfile.gettempdir` would choose another one while the disk of the usual one is full.
    """
    named = (os.environ.get(name) for name in ("TMPDIR", "TEMP", "TMP"))
    base = next((path for path in named if path and Path(path).is_dir()), "/tmp")  # noqa: S108 - as tempfile
    return Path(base) / f"ewsjf-{os.getuid()}"


def instance_folder(port: int) -> Path:
    """Return the folder of an instance. It is short, because Ray's socket paths have at most 107 bytes."""
    return instances_folder() / str(port)


def default_settings() -> dict[str, str]:
    """Return the Ray Serve settings for this application, parsed like a shell does."""
    words = shlex.split(_SETTINGS.read_text(encoding="utf-8"), comments=True)
    return dict(word.split("=", 1) for word in words)


def environment(given: Mapping[str, str]) -> dict[str, str]:
    """Return the environment of the host and its processes; `given` takes precedence over defaults."""
    inherited = dict(given)
    # A dozen processes import the same thousand modules, so cache their bytecode, whatever a container image
    # sets.
    inherited.pop("PYTHONDONTWRITEBYTECODE", None)
    return default_settings() | inherited
