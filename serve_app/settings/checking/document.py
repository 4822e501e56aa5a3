"""A YAML file with the lines of its keys, and mistakes in it.

PyYAML's nodes have line numbers and its plain values do not, so a file is composed into nodes as well.
Duplicate keys are rejected, because PyYAML would silently use the last one.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

# Matches the steps of a path such as `models[0].pools[1].name` at the beginning of a sentence.
_STEP = re.compile(r"([A-Za-z_][\w-]*)|\[(\d+)\]")

Step = str | int


@dataclass(frozen=True, slots=True)
class Mistake:
    """A mistake and its line number in the file, from 1; None if no line is at fault."""

    message: str
    line: int | None = None

    def located(self, path: Path) -> str:
        """Return the message in the format of compilers, so that editors can jump to the line."""
        place = f"{path}:{self.line}" if self.line is not None else str(path)
        return f"{place}: {self.message}"


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
