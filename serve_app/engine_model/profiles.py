"""Named engine profiles: how fast a model runs on some GPUs, and what it can hold.

A profile is a YAML file. Those in `profile_data` go by their name (`model-gpu-tpN`), any other by its path;
`calibrate` writes them. Each file states the source of its figures.
"""

from dataclasses import asdict
from importlib import resources
from pathlib import Path
from typing import Any

import yaml
from pydantic import TypeAdapter, ValidationError

from serve_app.engine_model.settings import EngineModelSettings
from serve_app.engine_model.step_time import StepTimeModel
from serve_app.errors import SettingsError
from serve_app.settings_base import settings

_DATA = resources.files("serve_app.engine_model") / "profile_data"


@settings
class EngineProfile:
    """One engine: a model on its GPUs.

    Attributes:
        step_time: duration of its iterations.
        kv_tokens: capacity of its KV cache.
        max_model_len: longest sequence it is started with.
        max_num_seqs: sequences in one batch.
        max_num_batched_tokens: tokens computed in one iteration.
        gpus: GPUs that one engine occupies.
    """

    step_time: StepTimeModel
    kv_tokens: int
    max_model_len: int
    max_num_seqs: int = 256
    max_num_batched_tokens: int = 2_048
    gpus: int = 1

    def model_settings(self, **overrides: Any) -> EngineModelSettings:
        """Settings of the engine model for this profile; an override that is None counts as not given."""
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
    return sorted(file.name.removesuffix(".yaml") for file in _DATA.iterdir() if file.name.endswith(".yaml"))


def load_profile(name_or_path: str) -> EngineProfile:
    """The profile of that name, or in that YAML file.

    Raises:
        SettingsError: there is no such profile, or its file is not one.
    """
    if name_or_path in profile_names():
        text = (_DATA / f"{name_or_path}.yaml").read_text(encoding="utf-8")
    elif name_or_path.endswith((".yaml", ".yml")) and Path(name_or_path).is_file():
        text = Path(name_or_path).read_text(encoding="utf-8")
    else:
        known = ", ".join(profile_names())
        raise SettingsError(
            f"no engine profile {name_or_path!r}: use one of {known}, or the path of a YAML file"
        )
    try:
        return _ADAPTER.validate_python(yaml.safe_load(text))
    except (yaml.YAMLError, ValidationError) as error:
        raise SettingsError(f"{name_or_path} is not an engine profile: {error}") from error


def save_profile(profile: EngineProfile, path: Path, *, source: str) -> None:
    """Write a profile that `load_profile` reads back; `source` says where its figures come from."""
    comment = "".join(f"# {line}\n" for line in source.splitlines())
    path.write_text(comment + yaml.safe_dump(asdict(profile), sort_keys=False), encoding="utf-8")
