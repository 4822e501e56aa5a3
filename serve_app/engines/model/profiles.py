"""Named engine profiles: the step times and the limits of a model on its GPUs.

A profile is a YAML file that states the source of its figures; `calibrate` writes them. Those of the package
lie in `profile_data`, a folder per model, and go by their name (`model-gpu-tpN`). Any other goes by its path.
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
        kv_tokens: capacity of its KV cache, in tokens.
        max_model_len: its context limit, in tokens.
        max_num_seqs: most sequences in a batch.
        max_num_batched_tokens: most tokens computed in one iteration.
        gpus: GPUs that one engine occupies.
    """

    step_time: StepTimeModel
    kv_tokens: int
    max_model_len: int
    max_num_seqs: int = 256
    max_num_batched_tokens: int = 2_048
    gpus: int = 1

    def model_settings(self, **overrides: Any) -> EngineModelSettings:
        """Settings of the engine model for this profile; overrides that are None are ignored."""
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
    """Names of the profiles that come with the package."""
    return sorted(_shipped())


def load_profile(name_or_path: str) -> EngineProfile:
    """The profile of that name, or in that YAML file.

    Raises:
        SettingsError: there is no such profile, or the file does not hold one.
    """
    if name_or_path in _shipped():
        text = _shipped()[name_or_path].read_text(encoding="utf-8")
    elif name_or_path.endswith((".yaml", ".yml")) and Path(name_or_path).is_file():
        text = Path(name_or_path).read_text(encoding="utf-8")
    else:
        near = difflib.get_close_matches(name_or_path, profile_names(), n=3)
        advice = f"did you mean {' or '.join(near)}?" if near else f"use one of {', '.join(profile_names())}"
        raise SettingsError(
            f"no engine profile {name_or_path!r}: {advice} A path of a YAML file will do, too"
        )
    try:
        return _ADAPTER.validate_python(yaml.safe_load(text))
    except (yaml.YAMLError, ValidationError) as error:
        raise SettingsError(f"{name_or_path} is not an engine profile: {error}") from error


def save_profile(profile: EngineProfile, path: Path, *, source: str) -> None:
    """Write a profile that `load_profile` reads back, with the source of its figures as a comment."""
    comment = "".join(f"# {line}\n" for line in source.splitlines())
    path.write_text(comment + yaml.safe_dump(asdict(profile), sort_keys=False), encoding="utf-8")


@cache
def _shipped() -> Mapping[str, Traversable]:
    """The files of the package's profiles, by name."""
    files = [file for model in _DATA.iterdir() if model.is_dir() for file in model.iterdir()]
    return {file.name.removesuffix(".yaml"): file for file in files}
