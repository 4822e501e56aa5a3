"""Profiles computed by the roofline for common models and GPUs, and the writer of their files.

    .venv/bin/python scripts/roofline_profiles.py --write

A profile fitted to measurements of the engine is better: see `ewsjf calibrate`.
"""

import argparse
import math
import textwrap
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import yaml

from serve_app.engines.model.hardware import GIB, load_gpu, load_model
from serve_app.engines.model.roofline import EngineProfile, EngineSetup, roofline_profile

_FOLDER = Path(__file__).resolve().parents[1] / "serve_app/engines/model/profile_data"
_DIGITS = 4
_WIDTH = 108
_ORIGIN = (
    "Computed, not measured: the roofline of serve_app/engines/model/roofline.py with the figures of "
    "hardware/gpus.yaml and hardware/models.yaml. Do not edit: "
    "scripts/roofline_profiles.py --write writes it."
)


SETUPS: tuple[tuple[str, str, int], ...] = (
    ("llama31-8b", "a100", 1),
    ("llama31-8b", "h100", 1),
    ("llama31-8b", "h200", 1),
    ("llama31-8b", "mi300x", 1),
    ("llama31-8b", "l40s", 1),
    ("llama2-13b", "a100", 1),
    ("llama2-13b", "a100", 4),
    ("llama2-13b", "h100", 1),
    ("llama2-13b", "l40s", 1),
    ("llama3-70b", "a100", 2),
    ("llama3-70b", "a100", 4),
    ("llama3-70b", "a100", 8),
    ("llama3-70b", "h100", 2),
    ("llama3-70b", "h100", 4),
    ("llama3-70b", "h100", 8),
    ("llama3-70b", "h200", 2),
    ("llama3-70b", "h200", 4),
    ("llama3-70b", "mi300x", 1),
    ("llama3-70b", "mi300x", 2),
    ("qwen3-235b-a22b", "h100", 8),
    ("qwen3-235b-a22b", "h200", 8),
    ("qwen3-235b-a22b", "mi300x", 4),
    ("qwen3-235b-a22b", "mi300x", 8),
)


def engine_setup(model: str, gpu: str, tensor_parallel: int) -> EngineSetup:
    """Return a setup by the names of its model and GPU.

    Raises:
        SettingsError: there are no figures for the model or the GPU.
    """
    return EngineSetup(model=load_model(model), gpu=load_gpu(gpu), tensor_parallel=tensor_parallel)


def profile_name(model: str, gpu: str, tensor_parallel: int) -> str:
    """Return the name of a profile."""
    return f"{model}-{gpu}-tp{tensor_parallel}"


def profile_path(model: str, gpu: str, tensor_parallel: int) -> Path:
    """Return the file of a profile in the package."""
    return _FOLDER / model / f"{profile_name(model, gpu, tensor_parallel)}.yaml"


def profile_text(model: str, gpu: str, tensor_parallel: int) -> str:
    """Return the text of a profile's YAML file: source and error as comments, then the figures.

    Raises:
        SettingsError: the model does not fit into the memory of the GPUs, or a name is unknown.
    """
    setup = engine_setup(model, gpu, tensor_parallel)
    profile = roofline_profile(setup)
    values = asdict(profile)
    values["step_time"] = {name: _rounded(value) for name, value in values["step_time"].items() if value}
    return _comment(setup, profile) + yaml.safe_dump(values, sort_keys=False)


def _comment(setup: EngineSetup, profile: EngineProfile) -> str:
    gpus, weights = setup.tensor_parallel, setup.model.weights_size
    cache = profile.kv_tokens * setup.model.kv_size_per_gpu(gpus) * gpus
    memory = gpus * setup.gpu.memory_gib * GIB / 1e9
    used = f"{weights / 1e9:.1f} GB of weights and {cache / 1e9:.1f} GB of KV cache"
    paragraphs = (
        _ORIGIN,
        f"Error: {setup.gpu.evidence}",
        f"Memory: {used} in 16 bits, in {setup.gpu_memory_utilization:.0%} of {memory:.1f} GB.",
    )
    lines = [
        line for paragraph in paragraphs for line in textwrap.wrap(paragraph, _WIDTH, break_on_hyphens=False)
    ]
    return "".join(f"# {line}\n" for line in lines)


def _rounded(value: float) -> float:
    """Round to four significant digits; the roofline is no more accurate."""
    return round(value, _DIGITS - 1 - math.floor(math.log10(value)))


def main(arguments: Sequence[str] | None = None) -> None:
    """Write the files of all profiles."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--write", action="store_true", required=True, help="write the files")
    parser.parse_args(arguments)
    for setup in SETUPS:
        path = profile_path(*setup)
        path.parent.mkdir(exist_ok=True)
        path.write_text(profile_text(*setup), encoding="utf-8")


if __name__ == "__main__":
    main()
