"""A YAML file with the lines of its keys.

PyYAML's nodes know their lines and its plain values do not, so a file is composed into nodes once, and read
from them. A key that stands twice in one mapping is refused: PyYAML would take the last one silently.
"""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from serve_app.checking.mistake import Mistake

# `models[0].pools[1].name` at the beginning of a sentence.
_STEP = re.compile(r"([A-Za-z_][\w-]*)|\[(\d+)\]")

Step = str | int


class UnreadableError(Exception):
    """A file is missing, or no YAML."""

    def __init__(self, mistake: Mistake) -> None:
        super().__init__(mistake.message)
        self.mistake = mistake


class Document:
    """A YAML file.

    Attributes:
        content: its plain value.
        mistakes: keys that stand twice.

    Raises:
        UnreadableError: it cannot be read.
    """

    def __init__(self, path: Path) -> None:
        try:
            text = path.read_text(encoding="utf-8")
        except FileNotFoundError:
            raise UnreadableError(Mistake(f"there is no such file{_others(path)}")) from None
        except (OSError, UnicodeDecodeError) as exc:
            raise UnreadableError(Mistake(f"cannot be read: {exc}")) from exc
        try:
            self._root = yaml.compose(text, Loader=yaml.SafeLoader)
            self.content: Any = yaml.safe_load(text)
        except yaml.MarkedYAMLError as exc:
            raise UnreadableError(_slip(exc)) from exc
        except yaml.YAMLError as exc:
            raise UnreadableError(Mistake(f"is no YAML: {exc}")) from exc
        self.mistakes = [] if self._root is None else list(_twice(self._root, set()))

    def line(self, steps: tuple[Step, ...]) -> int | None:
        """The line of the value under these keys, or of the innermost one that is there."""
        node, line = self._root, None
        for step in steps:
            found = _below(node, step)
            if found is None:
                break
            node, line = found
        return line

    def mistake(self, before: tuple[Step, ...], sentence: str) -> Mistake:
        """A sentence that begins with the path of a setting, below the keys in `before`."""
        return Mistake(sentence, self.line((*before, *_steps(sentence))))


def _others(path: Path) -> str:
    """The configurations that are beside a missing one."""
    folder = path.parent
    beside = sorted(each.name for each in folder.glob("*.y*ml")) if folder.is_dir() else []
    return f": {folder} has {', '.join(beside)}" if beside else ""


def _slip(error: yaml.MarkedYAMLError) -> Mistake:
    mark = error.problem_mark or error.context_mark
    what = error.problem or error.context or "cannot be understood"
    advice = ""
    if "\\t" in what:
        advice = ": indent with spaces"
    elif "mapping values are not allowed" in what:
        advice = ": is a line above indented otherwise, or is a text with a colon not quoted?"
    return Mistake(f"is no YAML: {what}{advice}", mark.line + 1 if mark is not None else None)


def _steps(sentence: str) -> Iterator[Step]:
    """The keys of the path with which a sentence begins."""
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


def _twice(node: yaml.Node, anchored: set[int]) -> Iterator[Mistake]:
    if id(node) in anchored:
        return
    anchored.add(id(node))
    if isinstance(node, yaml.MappingNode):
        seen: dict[str, int] = {}
        for key, value in node.value:
            line = key.start_mark.line + 1
            if key.value in seen:
                yield Mistake(
                    f"{key.value} stands twice in one block, first in line {seen[key.value]}: keep one", line
                )
            seen[key.value] = line
            yield from _twice(value, anchored)
    elif isinstance(node, yaml.SequenceNode):
        for each in node.value:
            yield from _twice(each, anchored)
