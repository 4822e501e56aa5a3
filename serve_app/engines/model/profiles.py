"""Named engine profiles: step times and limits of a model on its GPUs.

A profile is a YAML file that states the source of its values; `calibrate` writes them. Built-in profiles are
in `profile_data`, one folder per model, and are loaded by name (`model-gpu-tpN`). Others are loaded by path.
"""

import difflib
from collections.abc import Mapping
from dataclasses import asdict
from functools import cache
from importlib import resources
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import Any

import yaml
from pydantic import TypeAdapter, ValidationError

from serve_app.core.settings_base import settings
from serve_app.engines.model.sequences import EngineModelSettings
from serve_app.engines.model.step_time import StepTimeModel
from serve_app.errors import SettingsError

_DATA = resources.files("serve_app.engines.model") / "profile_data"


@settings
class EngineProfile:
    """One engine: a model on its GPUs.

    Attributes:
        step_time: duration of its iterations.
        kv_tokens: capacity of the KV cache, in tokens.
        max_model_len: context limit, in tokens.
        max_num_seqs: maximum number of sequences in a batch.
        max_num_batched_tokens: maximum number of tokens computed per iteration.
        gpus: GPUs per engine.
    """

    step_time: StepTimeModel
    kv_tokens: int
    max_model_len: int
    max_num_seqs: int = 256
    max_num_batched_tokens: int = 2_048
    gpus: int = 1

    def model_settings(self, **overrides: Any) -> EngineModelSettings:
        """Return engine model settings for this profile. Overrides that are None are ignored."""
        values: dict[str, Any] = {
            "kv_tokens": self.kv_tokens,
            "max_model_len": self.max_model_len,
            "max_num_seqs": self.max_num_seqs,
            "max_num_batched_tokens": self.max_num_batched_tokens,
        }
        values |= {name: value for name, value in overrides.items() if value is not None}
        return EngineModelSettings(**values)


_ADAPTER = TypeAdapter(EngineProfile)


def profile_names() -> list[str]:
    """Return the names of the built-in profiles."""
    return sorted(_shipped())


def load_profile(name_or_path: str) -> EngineProfile:
    """Load a profile by name, or from a YAML file.

    Raises:
        SettingsError: there is no such profile, or the file is not a profile.
    """
    if name_or_path in _shipped():
        text = _shipped()[name_or_path].read_text(encoding="utf-8")
    elif name_or_path.endswith((".yaml", ".yml")) and Path(name_or_path).is_file():
        text = Path(name_or_path).read_text(encoding="utf-8")
    else:
        near = difflib.get_close_matches(name_or_path, profile_names(), n=3)
        advice = f"did you mean {' or '.join(near)}?" if near else f"use one of {', '.join(profile_names())}"
        raise SettingsError(
            f"no engine profile {name_or_path!r}: {advice} A path of a YAML file is also accepted"
        )
    try:
        return _ADAPTER.validate_python(yaml.safe_load(text))
    except (yaml.YAMLError, ValidationError) as error:
        raise SettingsError(f"{name_or_path} is not an engine profile: {error}") from error


def save_profile(profile: EngineProfile, path: Path, *, source: str) -> None:
    """Write a profile for `load_profile`, with the source of its values as a comment."""
    comment = "".join(f"# {line}\n" for line in source.splitlines())
    path.write_text(comment + yaml.safe_dump(asdict(profile), sort_keys=False), encoding="utf-8")


@cache
def _shipped() -> Mapping[str, Traversable]:
    """Return the files of the built-in profiles by name."""
    files = [file for model in _DATA.iterdir() if model.is_dir() for file in model.iterdir()]
    return {file.name.removesuffix(".yaml"): file for file in files}
