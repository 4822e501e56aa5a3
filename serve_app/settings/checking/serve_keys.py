"""The keys of a Ray Serve configuration around `args`, and their checks.

Ray Serve ignores unknown keys, so a misspelled `port` would go unnoticed. The names are listed here because
importing Serve takes seconds; a test compares them with the installed release.
"""

import difflib
from collections.abc import Iterator, Mapping
from typing import Any

from serve_app.settings.checking.document import Document, Mistake, Step

TOP = frozenset(
    {
        *("proxy_location", "http_options", "grpc_options", "controller_options", "logging_config"),
        *("tracing_config", "applications", "target_capacity"),
    }
)
HTTP_OPTIONS = frozenset(
    {
        *("host", "port", "root_path", "request_timeout_s", "keep_alive_timeout_s"),
        *("ssl_keyfile", "ssl_certfile", "ssl_keyfile_password", "ssl_ca_certs"),
    }
)
GRPC_OPTIONS = frozenset({"port", "grpc_servicer_functions", "request_timeout_s", "enable_reflection"})
LOGGING_CONFIG = frozenset(
    {"encoding", "log_level", "logs_dir", "enable_access_log", "additional_log_standard_attrs"}
)
APPLICATION = frozenset(
    {
        *("name", "route_prefix", "import_path", "runtime_env", "host", "port", "deployments"),
        *("autoscaling_policy", "args", "logging_config", "external_scaler_enabled"),
    }
)
NO_PROXY = "Disabled"

_BLOCKS: Mapping[str, frozenset[str]] = {
    "http_options": HTTP_OPTIONS,
    "grpc_options": GRPC_OPTIONS,
    "logging_config": LOGGING_CONFIG,
}
_MAX_PORT = 65_535


def check_serve_keys(document: Document, import_path: str) -> Iterator[Mistake]:
    """Yield mistakes outside `args`: unknown keys, wrong types, none or several matching applications."""
    content = document.content
    if not isinstance(content, Mapping):
        yield Mistake("is not a Ray Serve configuration: it must have a list `applications`")
        return
    yield from _unknown(document, content, (), TOP)
    for block, known in _BLOCKS.items():
        value = content.get(block)
        if value is not None and not isinstance(value, Mapping):
            yield _at(document, (block,), f"must be a mapping of settings, got {value!r}")
        elif value is not None:
            yield from _unknown(document, value, (block,), known)
    yield from _check_values(document, content)
    yield from _check_applications(document, content, import_path)


def _check_values(document: Document, content: Mapping[str, Any]) -> Iterator[Mistake]:
    if (location := content.get("proxy_location")) != NO_PROXY:
        yield _at(
            document,
            ("proxy_location",),
            f"must be {NO_PROXY}, because gateways listen on http_options.port themselves, got {location!r}",
        )
    for block in ("http_options", "grpc_options"):
        options = content.get(block)
        if not isinstance(options, Mapping):
            continue
        port = options.get("port", 8000)
        if isinstance(port, bool) or not isinstance(port, int) or not 0 < port <= _MAX_PORT:
            yield _at(
                document, (block, "port"), f"must be a whole number from 1 to {_MAX_PORT}, got {port!r}"
            )
        host = options.get("host", "")
        if block == "http_options" and options.get("request_timeout_s"):
            yield _at(document, (block, "request_timeout_s"), "is not supported: use queue_timeout_s instead")
        if not isinstance(host, str):
            yield _at(document, (block, "host"), f"must be a string such as 127.0.0.1, got {host!r}")


def _check_applications(
    document: Document, content: Mapping[str, Any], import_path: str
) -> Iterator[Mistake]:
    applications = content.get("applications")
    if not isinstance(applications, list):
        yield _at(document, ("applications",), f"must be a list, got {applications!r}")
        return
    ours = 0
    for number, application in enumerate(applications):
        where: tuple[Step, ...] = ("applications", number)
        if not isinstance(application, Mapping):
            yield _at(document, where, f"must be a mapping of settings, got {application!r}")
            continue
        yield from _unknown(document, application, where, APPLICATION)
        if application.get("import_path") == import_path:
            ours += 1
        elif application.get("import_path") is None:
            yield _at(document, where, f"has no import_path: add import_path: {import_path}")
    if ours != 1 and len(applications) != 1:
        advice = f"exactly one entry must have import_path: {import_path}, got {ours}"
        yield _at(document, ("applications",), advice)


def _unknown(
    document: Document, given: Mapping[Any, Any], where: tuple[Step, ...], known: frozenset[str]
) -> Iterator[Mistake]:
    for key in given:
        if key in known:
            continue
        near = difflib.get_close_matches(str(key), known, n=1)
        advice = f"did you mean {near[0]}?" if near else f"known keys: {', '.join(sorted(known))}"
        yield _at(document, (*where, key), f"is unknown to Ray Serve: {advice}")


def _at(document: Document, where: tuple[Step, ...], what: str) -> Mistake:
    path = ""
    for step in where:
        path += f"[{step}]" if isinstance(step, int) else f".{step}" if path else str(step)
    return Mistake(f"{path} {what}", document.line(where))
