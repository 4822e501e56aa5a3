"""Checks of engines before a start: vLLM's arguments by its own parser, model folders, remote servers."""

import asyncio
import os
from collections.abc import Iterator
from pathlib import Path

from serve_app.engines.vllm.engine import VllmEngineSettings
from serve_app.errors import EngineError, SettingsError
from serve_app.serving.remote.endpoint import unusable_endpoints
from serve_app.serving.remote.sources import FixedSource, source_of
from serve_app.settings.application import ApplicationSettings

# A name on the model hub has the form owner/name.
_HUB_STEPS = 2


def check_engines(settings: ApplicationSettings, *, on_this_machine: bool) -> Iterator[str]:
    """Yield a sentence for each engine that cannot start, beginning with the path of the setting."""
    seen: set[str] = set()
    for where, engine in _vllm_engines(settings):
        if on_this_machine:
            yield from _check_model(where, engine)
        for sentence in _check_args(where, engine):
            # Pools often share their arguments, so report the same error only once.
            if sentence.partition(": ")[2] not in seen:
                seen.add(sentence.partition(": ")[2])
                yield sentence


def check_endpoints(settings: ApplicationSettings, *, probe: bool) -> Iterator[str]:
    """Yield a sentence for each endpoint in two pools of a model and, with `probe`, for each unusable one."""
    for number, model in enumerate(settings.models):
        first_pool: dict[str, str] = {}
        for place, pool in enumerate(model.pools):
            remote, failures = pool.engine.remote, dict[str, str]()
            if remote is None:
                continue
            where = f"models[{number}].pools[{place}].engine.remote"
            if probe:
                try:
                    failures = asyncio.run(unusable_endpoints(remote))
                except EngineError as exc:
                    yield f"{where}.api_key_env: {exc}"
            for index, text in enumerate(remote.endpoints):
                source = source_of(text)
                url = str(source.url) if isinstance(source, FixedSource) else text
                if (other := first_pool.setdefault(url, pool.name)) != pool.name:
                    yield (
                        f"{where}.endpoints[{index}]: {text} is an endpoint of pool {other} too, so its "
                        "capacity would count twice: remove it from one of the pools"
                    )
                if url in failures:
                    yield f"{where}.endpoints[{index}]: {failures[url]}"


def _vllm_engines(settings: ApplicationSettings) -> Iterator[tuple[str, VllmEngineSettings]]:
    for number, model in enumerate(settings.models):
        for place, pool in enumerate(model.pools):
            if pool.engine.vllm is not None:
                yield f"models[{number}].pools[{place}].engine.vllm", pool.engine.vllm


def _check_model(where: str, engine: VllmEngineSettings) -> Iterator[str]:
    """Check that a model folder exists. Names on the hub are not checked unless the hub is disabled."""
    model = engine.model
    folder = Path(model).expanduser()
    if folder.exists():
        if folder.is_dir() and not any(folder.glob("*.json")) and not any(folder.glob("*.gguf")):
            yield f"{where}.model: folder {model} has no config.json"
        return
    first = Path(model).parts[0]
    looks_like_a_path = model.startswith(("/", ".", "~")) or len(Path(model).parts) != _HUB_STEPS
    if looks_like_a_path or Path(first).is_dir():
        yield f"{where}.model: folder {model} does not exist in {Path.cwd()}{_sibling_folders(folder)}"
    elif _is_offline(engine) and not _is_cached(model):
        yield (
            f"{where}.model: {model} is not a folder, and HF_HUB_OFFLINE disables the model hub: "
            "download the model first, or remove HF_HUB_OFFLINE"
        )


def _sibling_folders(folder: Path) -> str:
    parent = folder.parent
    if not parent.is_dir():
        return ""
    names = sorted(each.name for each in parent.iterdir() if each.is_dir())
    return f"; {parent} has {', '.join(names)}" if names else f"; {parent} is empty"


def _is_offline(engine: VllmEngineSettings) -> bool:
    value = str(engine.env.get("HF_HUB_OFFLINE", os.environ.get("HF_HUB_OFFLINE", "")))
    return value.lower() in {"1", "true", "yes", "on"}


def _is_cached(model: str) -> bool:
    """Return whether the hub's cache on this machine has the model."""
    home = Path(os.environ.get("HF_HOME", "~/.cache/huggingface")).expanduser()
    cache = Path(os.environ.get("HF_HUB_CACHE", home / "hub"))
    return (cache / f"models--{model.replace('/', '--')}").is_dir()


def _check_args(where: str, engine: VllmEngineSettings) -> Iterator[str]:
    try:
        engine.check()
    except (SettingsError, EngineError) as exc:
        sentence = str(exc)
        separator = "." if sentence.startswith("args.") else ": "
        yield f"{where}{separator}{sentence}"
