"""A Ray Serve configuration file: line numbers of its keys, and checks of the keys around `args`."""

import difflib
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

# -- mistakes ----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Mistake:
    """A mistake and its line number in the file, from 1; None if no line is at fault."""

    message: str
    line: int | None = None

    def located(self, path: Path) -> str:
        """Return the message in the format of compilers, so that editors can jump to the line."""
        place = f"{path}:{self.line}" if self.line is not None else str(path)
        return f"{place}: {self.message}"


# -- a YAML file with the lines of its keys ------------------------------------------------------------------
#
# PyYAML's nodes have line numbers and its plain values do not, so a file is composed into nodes as well.
# Duplicate keys are rejected, because PyYAML would silently use the last one.


# Matches the steps of a path such as `models[0].pools[1].name` at the beginning of a sentence.
_STEP = re.compile(r"([A-Za-z_][\w-]*)|\[(\d+)\]")

Step = str | int


class UnreadableError(Exception):
    """The file is missing or not YAML."""

    def __init__(self, mistake: Mistake) -> None:
        super().__init__(mistake.message)
        self.mistake = mistake


class Document:
    """A YAML file.

    Attributes:
        content: plain value of the file.
        mistakes: duplicate keys.

    Raises:
        UnreadableError: the file cannot be read.
    """

    def __init__(self, path: Path) -> None:
        try:
            text = path.read_text(encoding="utf-8")
        except FileNotFoundError:
            raise UnreadableError(Mistake(f"file not found{_other_files(path)}")) from None
        except (OSError, UnicodeDecodeError) as exc:
            raise UnreadableError(Mistake(f"cannot be read: {exc}")) from exc
        try:
            self._root = yaml.compose(text, Loader=yaml.SafeLoader)
            self.content: Any = yaml.safe_load(text)
        except yaml.MarkedYAMLError as exc:
            raise UnreadableError(_syntax_error(exc)) from exc
        except yaml.YAMLError as exc:
            raise UnreadableError(Mistake(f"is not valid YAML: {exc}")) from exc
        except RecursionError as exc:
            raise UnreadableError(Mistake("is nested too deeply for a configuration")) from exc
        self.mistakes = [] if self._root is None else list(_duplicate_keys(self._root, set()))

    def line(self, steps: tuple[Step, ...]) -> int | None:
        """Return the line of the value under these keys, or of the innermost existing one."""
        node, line = self._root, None
        for step in steps:
            found = _below(node, step)
            if found is None:
                break
            node, line = found
        return line

    def mistake(self, before: tuple[Step, ...], sentence: str) -> Mistake:
        """Create a mistake from a sentence that begins with a setting's path, relative to `before`."""
        return Mistake(sentence, self.line((*before, *_steps(sentence))))


def _other_files(path: Path) -> str:
    """Return the configurations in the folder of a missing one."""
    folder = path.parent
    beside = sorted(each.name for each in folder.glob("*.y*ml")) if folder.is_dir() else []
    return f": {folder} has {', '.join(beside)}" if beside else ""


def _syntax_error(error: yaml.MarkedYAMLError) -> Mistake:
    mark = error.problem_mark or error.context_mark
    line = mark.line + 1 if mark is not None else None
    if isinstance(error, yaml.composer.ComposerError) and "single document" in (error.context or ""):
        return Mistake("has several documents: remove this `---`, and what belongs to another file", line)
    what = error.problem or error.context or "syntax error"
    advice = ""
    if "\\t" in what:
        advice = ": indent with spaces"
    elif "mapping values are not allowed" in what:
        advice = ": check the indentation of the lines above, and quote texts with a colon"
    return Mistake(f"is not valid YAML: {what}{advice}", line)


def _steps(sentence: str) -> Iterator[Step]:
    """Parse the keys of the path with which a sentence begins."""
    path = sentence.split(" ", 1)[0].rstrip(":,")
    for key, number in _STEP.findall(path):
        yield int(number) if number else key


def _below(node: yaml.Node | None, step: Step) -> tuple[yaml.Node, int] | None:
    if isinstance(node, yaml.MappingNode):
        for key, value in node.value:
            if key.value == step:
                return value, key.start_mark.line + 1
        for merged in (value for key, value in node.value if key.value == "<<"):
            if (found := _below(merged, step)) is not None:
                return found
    elif isinstance(node, yaml.SequenceNode) and isinstance(step, int) and step < len(node.value):
        found = node.value[step]
        return found, found.start_mark.line + 1
    return None


def _duplicate_keys(node: yaml.Node, anchored: set[int]) -> Iterator[Mistake]:
    if id(node) in anchored:
        return
    anchored.add(id(node))
    if isinstance(node, yaml.MappingNode):
        seen: dict[str, int] = {}
        for key, value in node.value:
            line = key.start_mark.line + 1
            if key.value in seen:
                yield Mistake(
                    f"{key.value} is duplicated in this block, first in line {seen[key.value]}: remove one",
                    line,
                )
            seen[key.value] = line
            yield from _duplicate_keys(value, anchored)
    elif isinstance(node, yaml.SequenceNode):
        for each in node.value:
            yield from _duplicate_keys(each, anchored)


# -- keys of a Ray Serve configuration around `args` ---------------------------------------------------------
#
# Ray Serve ignores unknown keys, so a misspelled `port` would go unnoticed. The names are listed here because
# importing Serve takes seconds; a test compares them with the installed release.


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
