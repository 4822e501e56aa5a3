"""Asks servers that run already what they serve."""

import json
import os
import urllib.error
from collections.abc import Iterable

from serve_app.command import fetched
from serve_app.engines.vllm_metrics import read_metrics
from serve_app.errors import EngineError, ServeAppError, SettingsError
from serve_app.first_config.fleet import Server


def ask_servers(urls: Iterable[str], api_key_env: str | None) -> tuple[Server, ...]:
    """What each server says of itself.

    Args:
        api_key_env: environment variable with their key.

    Raises:
        ServeAppError: one does not answer, refuses, or cannot be used.
    """
    api_key = None
    if api_key_env is not None and not (api_key := os.environ.get(api_key_env)):
        raise SettingsError(
            f"the environment variable {api_key_env} is not set: export the servers' key there"
        )
    return tuple(_ask(url, api_key) for url in urls)


def _ask(given: str, api_key: str | None) -> Server:
    if not given.startswith(("http://", "https://")):
        raise SettingsError(
            f"{given!r} is no address of a server: begin it with http:// (the file to write stands before "
            "--servers)"
        )
    url = given.rstrip("/").removesuffix("/v1")
    models, context = _models(url, _fetched(f"{url}/v1/models", api_key))
    try:
        metrics = read_metrics(_fetched(f"{url}/metrics", api_key))
    except EngineError as exc:
        raise ServeAppError(f"{url}/metrics has no metrics of vLLM, which backpressure needs: {exc}") from exc
    if metrics.kv_tokens is None:
        raise ServeAppError(
            f"{url} does not state its KV cache: write its pool by hand, with engine.remote.kv_tokens"
        )
    return Server(url=url, models=models, max_model_len=context)


def _fetched(url: str, api_key: str | None) -> str:
    try:
        return fetched(url, api_key).decode("utf-8", "replace")
    except urllib.error.HTTPError as exc:
        hint = ": name the variable with its key by --api-key-env" if exc.code in {401, 403} else ""
        raise ServeAppError(f"{url} answered {exc.code} {exc.reason}{hint}") from exc
    except OSError as exc:
        reason = exc.reason if isinstance(exc, urllib.error.URLError) else exc
        raise ServeAppError(f"{url} does not answer: {reason}") from exc


def _models(url: str, text: str) -> tuple[tuple[str, ...], int]:
    """The names, and the shortest context that is stated."""
    try:
        models = json.loads(text)["data"]
        # Adapters name the model that they belong to.
        ordered = sorted(models, key=lambda model: model.get("parent") is not None)
        names = tuple(str(model["id"]) for model in ordered)
        stated = [model["max_model_len"] for model in models if isinstance(model.get("max_model_len"), int)]
    except (ValueError, KeyError, TypeError, AttributeError) as exc:
        raise ServeAppError(f"{url}/v1/models is no list of models: {text[:100]!r}") from exc
    if not names:
        raise ServeAppError(f"{url} serves no model")
    if not stated:
        raise ServeAppError(
            f"{url} does not state its max_model_len: write its pool by hand, with "
            "engine.remote.max_model_len"
        )
    return names, min(stated)
