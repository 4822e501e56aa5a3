"""All checks of a configuration, in order: file, Ray Serve's keys, settings, engines, this machine."""

import contextlib
from collections.abc import Container, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import fsspec

from serve_app.errors import SettingsError
from serve_app.serving.api_keys import KeysFileError, read_keys
from serve_app.settings.address import http_address, with_port
from serve_app.settings.application import ApplicationSettings
from serve_app.settings.checking.capacity import check_capacity
from serve_app.settings.checking.document import Document, Mistake, UnreadableError
from serve_app.settings.checking.engines import check_endpoints, check_engines
from serve_app.settings.checking.machine import check_machine, single_gpu_name
from serve_app.settings.checking.serve_keys import check_serve_keys
from serve_app.settings.loading import IMPORT_PATH, settings_of


@dataclass(slots=True)
class CheckResult:
    """Result of a check.

    Attributes:
        mistakes: errors that prevent a start.
        warnings: limits that an engine cannot reach according to the capacity model; they do not prevent a
            start.
        content: the whole file as plain values; empty if it cannot be read.
        settings: settings of this project's application; None if they have mistakes.
    """

    mistakes: list[Mistake] = field(default_factory=list)
    warnings: list[Mistake] = field(default_factory=list)
    content: Mapping[str, Any] = field(default_factory=dict)
    settings: ApplicationSettings | None = None


def check_file(
    path: Path,
    *,
    on_this_machine: bool = True,
    gpu: str | None = None,
    port: int | None = None,
    own_ports: Container[int] = (),
    probe: bool = False,
) -> CheckResult:
    """Return all mistakes in a configuration that can be found before Ray starts.

    Args:
        on_this_machine: also check ports, cores, GPUs, memory and model folders; False for a configuration
            that another machine or a cluster runs.
        gpu: GPU of the engines; None for this machine's if it runs the configuration.
        port: the application's port, instead of the file's.
        own_ports: ports of running applications of this project, which a configuration may change: then its
            port and the free memory are not checked.
        probe: also query the endpoints of remote pools that are configured as URLs.
    """
    found = CheckResult()
    try:
        document = Document(path)
    except UnreadableError as exc:
        found.mistakes.append(exc.mistake)
        return found
    found.mistakes += [*document.mistakes, *check_serve_keys(document, IMPORT_PATH)]
    if not isinstance(document.content, Mapping):
        return found
    found.content = document.content = with_port(document.content, port)
    number, application = _find_application(document.content)
    if application is None:
        return found
    where: tuple[str | int, ...] = ("applications", number, "args")
    try:
        found.settings = settings_of(application.get("args", {}))
    except SettingsError as exc:
        found.mistakes += [document.mistake(where, sentence) for sentence in str(exc).splitlines()]
        return found
    found.mistakes += [
        document.mistake(where, sentence)
        for sentence in (
            *check_engines(found.settings, on_this_machine=on_this_machine),
            *check_endpoints(found.settings, probe=probe),
        )
    ]
    found.mistakes += _exposure(document, found.settings)
    gpu = gpu or (single_gpu_name() if on_this_machine else None)
    found.warnings += [document.mistake(where, sentence) for sentence in check_capacity(found.settings, gpu)]
    if on_this_machine:
        found.warnings += [document.mistake(where, sentence) for sentence in _budgets(found.settings)]
        found.mistakes += _machine_mistakes(document, found.settings, own_ports)
        sentences = (*_state(found.settings), *_tracing(found.settings))
        found.mistakes += [document.mistake(where, sentence) for sentence in sentences]
    return found


def _state(settings: ApplicationSettings) -> Iterator[str]:
    """Check that the client package for the store of learned state is installed."""
    if settings.state_uri is None:
        return
    try:
        fsspec.get_filesystem_class(fsspec.utils.get_protocol(settings.state_uri))
    except (ImportError, ValueError) as exc:
        # The error names the missing package.
        yield f"state_uri {settings.state_uri} cannot be used here: {exc}"


def _budgets(settings: ApplicationSettings) -> Iterator[str]:
    """Check that the counts of keys with a budget survive a restart."""
    path = settings.gateway.keys_path
    if settings.state_uri is not None or path is None:
        return
    with contextlib.suppress(KeysFileError):  # a gateway waits for a valid file
        keys = [key.id for key in read_keys(path) if key.has_budget and key.revoked_at is None]
        if keys:
            yield (
                f"gateway.keys_file {path}: without a state_uri, each start counts the budget of the keys "
                f"{', '.join(keys)} from zero: set state_uri"
            )


def _tracing(settings: ApplicationSettings) -> Iterator[str]:
    """Check that OpenTelemetry is installed here and supports the configured tracing."""
    try:
        settings.gateway.check_tracing()
    except SettingsError as exc:
        yield str(exc)


def _exposure(document: Document, settings: ApplicationSettings) -> Iterator[Mistake]:
    try:
        host, _ = http_address(document.content)
    except (TypeError, ValueError):
        return  # check_serve_keys reports it
    try:
        settings.gateway.check_exposure(host)
    except SettingsError as exc:
        yield Mistake(str(exc), document.line(("http_options", "host")))


def _machine_mistakes(
    document: Document, settings: ApplicationSettings, own_ports: Container[int]
) -> Iterator[Mistake]:
    for path, sentence in check_machine(document.content, settings, own_ports):
        yield Mistake(sentence, document.line(path))


def _find_application(content: Mapping[str, Any]) -> tuple[int, Mapping[str, Any] | None]:
    """Return the application with this project's import path, or the only one, which may extend it."""
    applications = content.get("applications")
    if isinstance(applications, list):
        if len(applications) == 1 and isinstance(applications[0], Mapping):
            return 0, applications[0]
        for number, application in enumerate(applications):
            if isinstance(application, Mapping) and application.get("import_path") == IMPORT_PATH:
                return number, application
    return 0, None
