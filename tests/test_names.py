"""Names and sizes in the tree: one class per name, statements as docstrings, folders of 15 files at most."""

import ast
import re
from collections import defaultdict
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1] / "serve_app"
MODULES = {path.relative_to(ROOT).as_posix(): path for path in sorted(ROOT.rglob("*.py"))}
MOST_FILES = 15
# A question mark before any other end of the first sentence.
QUESTION = re.compile(r"[^.:;]*\?")


def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def asks(docstring: str) -> bool:
    return QUESTION.match(docstring) is not None


@pytest.mark.parametrize(
    ("docstring", "expected"),
    [
        ("How long does a step take? A roofline.", True),
        ("How long\ndoes a step take?", True),
        ("The duration of a step. Why a maximum?", False),
        ("A queue: who is next?", False),
    ],
)
def test_a_question_is_told_from_a_statement(docstring: str, expected: bool) -> None:
    assert asks(docstring) is expected


def test_class_names_are_unique() -> None:
    homes = defaultdict(list)
    for name, path in MODULES.items():
        for node in ast.walk(parsed(path)):
            if isinstance(node, ast.ClassDef):
                homes[node.name].append(f"{name}:{node.lineno}")
    assert {name: places for name, places in homes.items() if len(places) > 1} == {}


def test_every_module_states_what_it_is() -> None:
    docstrings = {name: ast.get_docstring(parsed(path)) for name, path in MODULES.items()}
    assert [name for name, docstring in docstrings.items() if not docstring] == []
    assert [name for name, docstring in docstrings.items() if docstring and asks(docstring)] == []


def test_every_package_has_a_guide() -> None:
    folders = {path.parent for path in MODULES.values()}
    assert [folder for folder in folders if not (folder / "__init__.py").exists()] == []


def test_no_folder_holds_more_files_than_can_be_taken_in() -> None:
    counts: dict[str, int] = defaultdict(int)
    for path in ROOT.rglob("*"):
        if path.is_file() and path.parent.name != "__pycache__":
            counts[path.parent.relative_to(ROOT).as_posix()] += 1
    assert {folder: count for folder, count in counts.items() if count > MOST_FILES} == {}
