"""Documentation in the source of a class: comments above fields, and `Attributes:` of docstrings.

A comment directly above a field belongs to that field alone. A field may have both texts: the docstring
describes the field, and the comment gives the reason for its default.
"""

import ast
import inspect
import re
import textwrap
from collections.abc import Iterator, Mapping

_SECTION = re.compile(r"^(Args|Attributes|Raises|Returns|Yields):$", re.MULTILINE)
_ENTRY = re.compile(r"^    (\w+(?:, \w+)*): (.*(?:\n {8}.*)*)", re.MULTILINE)


def summary(cls: type) -> str:
    """Return the docstring of a class before its sections."""
    return _SECTION.split(inspect.getdoc(cls) or "")[0].strip()


def attribute_texts(cls: type) -> dict[str, str]:
    """Return the `Attributes:` texts of a class and its bases, by field."""
    found: dict[str, str] = {}
    for base in reversed(cls.__mro__):
        parts = _SECTION.split(inspect.cleandoc(base.__doc__ or ""))
        for title, body in zip(parts[1::2], parts[2::2], strict=True):
            if title == "Attributes":
                for names, text in _ENTRY.findall(body):
                    found.update(dict.fromkeys(names.split(", "), " ".join(text.split())))
    return found


def field_comments(cls: type) -> dict[str, str]:
    """Return the comments directly above the fields of a class and its bases, by field."""
    found: dict[str, str] = {}
    for base in reversed(cls.__mro__):
        if base.__module__.startswith("serve_app"):
            found.update(_comments(base))
    return found


def _comments(cls: type) -> Mapping[str, str]:
    source = textwrap.dedent(inspect.getsource(cls))
    (tree,) = ast.parse(source).body
    assert isinstance(tree, ast.ClassDef), "the source of a class is a class"
    lines = source.splitlines()
    return {name: text for name, line in _members(tree) if (text := " ".join(_comment_above(lines, line)))}


def _members(tree: ast.ClassDef) -> Iterator[tuple[str, int]]:
    """Yield the names of fields and enum members, each with its line number."""
    for node in tree.body:
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            yield node.target.id, node.lineno
        elif isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            yield node.targets[0].id, node.lineno


def _comment_above(lines: list[str], line: int) -> list[str]:
    above: list[str] = []
    for text in reversed(lines[: line - 1]):
        if not text.strip().startswith("#"):
            break
        above.insert(0, text.strip().lstrip("#").strip())
    return above
