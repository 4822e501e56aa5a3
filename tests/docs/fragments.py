"""Settings in documents: whole files, and fragments that are completed and parsed."""

import re
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from serve_app.errors import SettingsError
from serve_app.settings.application import load_settings
from tests.docs.marks import BlockError

# Settings that a block needs besides its fragment.
_STARTS: Mapping[str, Mapping[str, Any]] = {
    "vllm": {"model": "any"},
    "remote": {"endpoints": ["http://engine.example:8000"]},
    "keys": {"tenant": "demo", "key": "secret"},
    "metrics_key": {"key": "secret"},
    "jwt": {
        "issuer": "https://login.example.com",
        "audience": "demo",
        "tenant_claim": "tenant",
        "jwks_url": "https://login.example.com/certs",
        "groups": [{"name": "demo"}],
    },
    "tls": {name: f"/etc/ewsjf/{name}.pem" for name in ("ca", "certificate", "key")},
    "decision_log": {"path": "decisions.jsonl"},
    "price": {"prompt": 1.0, "generated": 1.0},
    "routes": {"name": "assistant", "models": {"demo": 1}},
    "parameters": {"profile": "laptop"},
}
_STEP = re.compile(r"(\w+)(?:\[(\d+)\])?\Z")


def _pool(name: str, max_model_len: int) -> dict[str, Any]:
    return {"name": name, "engine": {"emulated": {"profile": "laptop", "max_model_len": max_model_len}}}


def _application(pools: int) -> dict[str, Any]:
    shapes = (_pool("short", 8_192), _pool("long", 16_384))
    return {"models": [{"name": "demo", "pools": list(shapes[:pools])}], "gateway": {}}


def check_application(content: Mapping[str, Any]) -> None:
    """Parse a whole Ray Serve configuration.

    Raises:
        BlockError: our settings reject it.
    """
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "serve.yaml"
        path.write_text(yaml.safe_dump(dict(content)))
        try:
            load_settings(path)
        except SettingsError as exc:
            raise BlockError(str(exc)) from exc


def check_fragment(fragment: object, path: str) -> None:
    """Insert a fragment at `args` or a path below it, such as `models[0].scheduler`, and parse the result.

    Raises:
        BlockError: there is no such place, or the settings are rejected.
    """
    if not isinstance(fragment, Mapping):
        raise BlockError(f"settings must be a mapping, got {type(fragment).__name__}")
    steps = [] if path == "args" else path.removeprefix("args.").split(".")
    # With one pool, its fragment need not fit the other pool's context.
    arguments = _application(1 if "pools" in path else 2)
    place: Any = arguments
    for step in steps:
        place = _inside(place, step, path)
    _merge(place, fragment)
    check_application({"applications": [{"import_path": "serve_app.app:build_app", "args": arguments}]})


def _inside(place: Any, step: str, path: str) -> Any:
    found = _STEP.match(step)
    if found is None or not isinstance(place, dict):
        raise BlockError(f"{path} is no place for settings: write one such as models[0].scheduler")
    if step in {"vllm", "remote"} and step not in place:
        # Another engine replaces the emulated one.
        place.clear()
    start = dict(_STARTS.get(found[1], {}))
    inner = place.setdefault(found[1], start if found[2] is None else [start])
    if found[2] is None:
        return inner
    if not isinstance(inner, list) or int(found[2]) >= len(inner):
        raise BlockError(f"{path} is no place for settings: there is no {step}")
    return inner[int(found[2])]


def _merge(place: dict[str, Any], fragment: Mapping[str, Any]) -> None:
    for key, value in fragment.items():
        # A pool has exactly one engine, so another one replaces it.
        if isinstance(value, Mapping) and isinstance(place.get(key), dict) and key != "engine":
            _merge(place[key], value)
        else:
            place[key] = value
