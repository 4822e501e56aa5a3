"""The map of the code names every package once, and only files, methods and tests that exist."""

import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.docs import names
from tests.docs.documents import ROOT, Passage, passages

MAP = "docs/architecture.md"
NAMING_CODE = (MAP, "docs/code-index.md", "CONTRIBUTING.md")

# A cell of a table is a passage, too.
_BARE_FILE = re.compile(r"\w+\.(?:py|js|env)\Z")
_ATTRIBUTE = re.compile(r"([A-Za-z_]\w*)\.([a-z_]\w*)\Z")


def packages() -> list[str]:
    found = (path.parent.relative_to(ROOT) for path in (ROOT / "serve_app").rglob("__init__.py"))
    return sorted(str(package) for package in found if package != Path("serve_app"))


def test_the_map_has_one_row_for_each_package() -> None:
    (begin,) = (each.line for each in passages(MAP) if each.kind == "heading" and each.text == "Packages")
    cells = [each for each in passages(MAP) if each.kind == "table" and each.line > begin and each.code]
    rows = Counter(cell.code[0] for cell in cells)
    assert [package for package in packages() if rows[package] != 1] == []


@pytest.mark.parametrize("document", NAMING_CODE)
def test_files_without_a_folder_are_beside_a_file_of_the_same_passage(document: str) -> None:
    missing = [
        f"{passage.place}: {name}"
        for passage in passages(document)
        for name in passage.code
        if _BARE_FILE.match(name) and not any((folder / name).exists() for folder in _folders(passage))
    ]
    assert missing == []


def _folders(passage: Passage) -> Iterator[Path]:
    """Folders of the paths that a passage names."""
    for name in passage.code:
        path = ROOT / name
        if "/" in name and path.exists():
            yield path if path.is_dir() else path.parent


@pytest.mark.parametrize("document", NAMING_CODE)
def test_dotted_names_exist(document: str) -> None:
    missing = [
        f"{passage.place}: {name}"
        for passage in passages(document)
        for name in passage.code
        if (parts := _ATTRIBUTE.match(name)) and not _BARE_FILE.match(name) and not _exists(*parts.groups())
    ]
    assert missing == []


def _exists(holder: str, attribute: str) -> bool:
    """Return whether a class has the attribute, a package the module, or the root the file."""
    if holder[0].isupper():
        pattern = re.compile(
            rf"^class {holder}\b.*?^    (?:async )?(?:def )?{attribute}\b", re.MULTILINE | re.DOTALL
        )
        return any(pattern.search(path.read_text()) for path in (ROOT / "serve_app").rglob("*.py"))
    if (ROOT / f"{holder}.{attribute}").exists() or holder in names.block_names():
        return True  # a file of the root, or a setting, which another test looks up
    return any((ROOT / "serve_app").rglob(f"{holder}/{attribute}.py"))


def test_the_invariants_of_the_map_are_tested_by_these_names() -> None:
    tests = "\n".join(path.read_text() for path in (ROOT / "tests/properties").glob("*.py"))
    rows = [passage for passage in passages(MAP) if passage.kind == "table" and passage.code]
    invariants = [row.code[0] for row in rows if re.fullmatch(r"[a-z]+(_[a-z]+)+", row.code[0])]
    assert len(invariants) >= 10
    assert [name for name in invariants if f"def {name}(" not in tests] == []
