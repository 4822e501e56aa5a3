"""What an endpoint is: which server, what it serves, its limits, and how its load is read."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from serve_app.engines.engine import EngineLimits
from serve_app.engines.vllm_metrics import VllmMetrics, read_metrics
from serve_app.errors import EngineError
from serve_app.serving.endpoints.control import ControlClient
from serve_app.serving.endpoints.settings import RemoteSettings
from serve_app.serving.endpoints.url import EndpointUrl


@dataclass(frozen=True, slots=True, kw_only=True)
class Identity:
    """One endpoint as it describes itself, completed by the settings.

    Attributes:
        server: its kind, such as vLLM.
        models: the names that it lists.
        lacks: what it does not tell, in words.
        metrics_path: the page that `read` reads.
    """

    server: str
    models: tuple[str, ...]
    limits: EngineLimits
    lacks: tuple[str, ...]
    metrics_path: str
    read: Callable[[bytes], VllmMetrics]


async def identified(control: ControlClient, url: EndpointUrl, settings: RemoteSettings) -> Identity:
    """Ask an endpoint what it is.

    Raises:
        EngineError: it does not answer, refuses the key, lacks a model, or does not state a limit that the
            settings lack as well.
    """
    models = _models(await control.page("/v1/models"), url)
    metrics = _read(await control.page("/metrics"))
    found = {
        "max_model_len": settings.max_model_len or _max_model_len(url, models, settings.served_model_names),
        "kv_tokens": settings.kv_tokens or metrics.kv_tokens,
        "max_num_seqs": settings.max_num_seqs or 256,
    }
    if unknown := [name for name, value in found.items() if value is None]:
        names = " and ".join(unknown)
        raise EngineError(
            f"{url} does not state its {names}: give {names} in the settings of this engine, as the server "
            "was started with"
        )
    stated = {name: value for name, value in found.items() if value is not None}
    return Identity(
        server="vLLM",
        models=tuple(model["id"] for model in models),
        limits=EngineLimits(**stated),
        lacks=(),
        metrics_path="/metrics",
        read=_read,
    )


def _read(page: bytes) -> VllmMetrics:
    return read_metrics(page.decode("utf-8", "replace"))


def _models(page: bytes, url: EndpointUrl) -> Sequence[Mapping[str, Any]]:
    try:
        models: Sequence[Mapping[str, Any]] = json.loads(page)["data"]
        readable = all(isinstance(model["id"], str) for model in models)
    except (ValueError, KeyError, TypeError):
        readable = False
    if not readable:
        raise EngineError(f"{url}/v1/models is no list of models: {page[:200]!r}")
    return models


def _max_model_len(
    url: EndpointUrl, models: Sequence[Mapping[str, Any]], wanted: tuple[str, ...] | None
) -> int | None:
    """The context limit that the server states for the wanted models, which share one engine."""
    served = {model["id"]: model for model in models}
    if missing := [name for name in wanted or () if name not in served]:
        raise EngineError(
            f"{url} serves {', '.join(served) or 'no model'} but not {', '.join(missing)}: start it with "
            f"--served-model-name {' '.join(wanted or ())}, or name another model here"
        )
    chosen = [served[name] for name in wanted or ()] or models
    stated = [model["max_model_len"] for model in chosen if isinstance(model.get("max_model_len"), int)]
    return min(stated, default=None)
