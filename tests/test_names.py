"""Names and docstrings: every module and package states its content."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1] / "serve_app"
MODULES = {path.relative_to(ROOT).as_posix(): path for path in sorted(ROOT.rglob("*.py"))}
# A question mark before any other end of the first sentence.
QUESTION = re.compile(r"[^.:;]*\?")


def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def is_question(docstring: str) -> bool:
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
def test_a_question_is_distinguished_from_a_statement(docstring: str, expected: bool) -> None:
    assert is_question(docstring) is expected


def test_every_module_states_what_it_is() -> None:
    docstrings = {name: ast.get_docstring(parsed(path)) for name, path in MODULES.items()}
    assert [name for name, docstring in docstrings.items() if not docstring] == []
    assert [name for name, docstring in docstrings.items() if docstring and is_question(docstring)] == []


def test_every_package_has_a_guide() -> None:
    folders = {path.parent for path in MODULES.values()}
    assert [folder for folder in folders if not (folder / "__init__.py").exists()] == []
