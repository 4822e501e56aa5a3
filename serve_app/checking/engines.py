"""Engines of a configuration: vLLM's arguments by vLLM's own parser, and model folders that are not there."""

import os
from collections.abc import Iterator
from pathlib import Path

from serve_app.engines.vllm.engine import VllmEngineSettings, check_vllm_args
from serve_app.errors import EngineError, SettingsError
from serve_app.settings.application import AppSettings

# A name on the model hub has an owner and a name.
_HUB_STEPS = 2


def check_engines(settings: AppSettings, *, on_this_machine: bool) -> Iterator[str]:
    """One sentence for each engine that cannot start, beginning with the path of the setting at fault."""
    seen: set[str] = set()
    for where, engine in _vllm_engines(settings):
        if on_this_machine:
            yield from _check_model(where, engine)
        for sentence in _check_args(where, engine):
            # Pools often share their arguments; one refusal is enough.
            if sentence.partition(": ")[2] not in seen:
                seen.add(sentence.partition(": ")[2])
                yield sentence


def _vllm_engines(settings: AppSettings) -> Iterator[tuple[str, VllmEngineSettings]]:
    for number, model in enumerate(settings.models):
        for place, pool in enumerate(model.pools):
            if pool.engine.vllm is not None:
                yield f"models[{number}].pools[{place}].engine.vllm", pool.engine.vllm


def _check_model(where: str, engine: VllmEngineSettings) -> Iterator[str]:
    """A folder that is missing; a name of the hub is taken on trust, unless the hub is switched off."""
    model = engine.model
    folder = Path(model).expanduser()
    if folder.exists():
        if folder.is_dir() and not any(folder.glob("*.json")) and not any(folder.glob("*.gguf")):
            yield f"{where}.model: the folder {model} holds no model: it has no config.json"
        return
    first = Path(model).parts[0]
    looks_like_a_path = model.startswith(("/", ".", "~")) or len(Path(model).parts) != _HUB_STEPS
    if looks_like_a_path or Path(first).is_dir():
        yield f"{where}.model: there is no folder {model} here ({Path.cwd()}){_beside(folder)}"
    elif _is_offline(engine) and not _is_cached(model):
        yield (
            f"{where}.model: {model} is no folder, and the model hub is switched off by HF_HUB_OFFLINE: "
            "download it first, or take HF_HUB_OFFLINE out"
        )


def _beside(folder: Path) -> str:
    parent = folder.parent
    if not parent.is_dir():
        return ""
    names = sorted(each.name for each in parent.iterdir() if each.is_dir())
    return f"; {parent} has {', '.join(names)}" if names else f"; {parent} is empty"


def _is_offline(engine: VllmEngineSettings) -> bool:
    value = str(engine.env.get("HF_HUB_OFFLINE", os.environ.get("HF_HUB_OFFLINE", "")))
    return value.lower() in {"1", "true", "yes", "on"}


def _is_cached(model: str) -> bool:
    """Whether the hub's own cache on this machine has the model."""
    home = Path(os.environ.get("HF_HOME", "~/.cache/huggingface")).expanduser()
    cache = Path(os.environ.get("HF_HUB_CACHE", home / "hub"))
    return (cache / f"models--{model.replace('/', '--')}").is_dir()


def _check_args(where: str, engine: VllmEngineSettings) -> Iterator[str]:
    try:
        check_vllm_args(engine)
    except (SettingsError, EngineError) as exc:
        sentence = str(exc)
        separator = "." if sentence.startswith("args.") else ": "
        yield f"{where}{separator}{sentence}"
