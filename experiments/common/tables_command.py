"""`experiments/tables`: writes the tables and pictures of documents from the rows, or reports differences.

A table in a document is between two comments: `table: NAME/TABLE`, with the experiment and its table, and
`end table`. See README.md of `experiments`.
"""

import argparse
import re
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from difflib import unified_diff
from pathlib import Path

from experiments.common.catalogue import Catalogue
from experiments.common.rows import read_rows
from serve_app.cli.command import print_result, warn
from serve_app.errors import ServeAppError, SettingsError

_BEGIN = re.compile(r"<!-- table: ([a-z0-9_-]+)/([a-z0-9_-]+) -->")
_END = "<!-- end table -->"
_PLACES = ("README.md", "docs/**/*.md", "experiments/README.md", "experiments/*/README.md")


@dataclass(frozen=True, slots=True)
class Document:
    """A document with tables, or a picture, that can be compared with the rows.

    Attributes:
        before: current text.
        after: text with current figures.
    """

    path: Path
    before: str
    after: str

    @property
    def is_stale(self) -> bool:
        """Return whether it differs from its rows."""
        return self.before != self.after


def documents(root: Path, catalogue: Catalogue) -> Iterator[Document]:
    """Yield every document of a checkout that may contain tables, and every picture whose rows exist.

    Raises:
        SettingsError: a comment names no table, or has no end.
    """
    for pattern in _PLACES:
        for path in sorted(root.glob(pattern)):
            before = path.read_text(encoding="utf-8")
            yield Document(path, before, _rewritten(before, path.relative_to(root), catalogue))
    for name in catalogue.names():
        for place, picture in catalogue.pictures(name).items() if catalogue.rows(name) else ():
            path = root / place
            yield Document(
                path, path.read_text(encoding="utf-8") if path.exists() else "", picture(catalogue.rows)
            )


def _rewritten(text: str, path: Path, catalogue: Catalogue) -> str:
    pieces, at = [], 0
    while (begin := _BEGIN.search(text, at)) is not None:
        line = text.count("\n", 0, begin.start()) + 1
        end = text.find(_END, begin.end())
        following = _BEGIN.search(text, begin.end())
        if end < 0 or (following is not None and following.start() < end):
            raise SettingsError(f"{path}:{line}: the table has no end: write {_END} after it")
        try:
            table = _table(begin[1], begin[2], catalogue)
        except SettingsError as error:
            raise SettingsError(f"{path}:{line}: {error}") from error
        pieces += [text[at : begin.end()], f"\n{table}\n"]
        at = end
    return "".join((*pieces, text[at:]))


def _table(name: str, table: str, catalogue: Catalogue) -> str:
    tables = catalogue.tables(name)
    if table not in tables:
        raise SettingsError(f"experiment {name} has no table {table!r}: it has {', '.join(tables)}")
    return tables[table].written(catalogue.rows(name))


ROOT = Path(__file__).resolve().parents[2]


def main(argv: Sequence[str] | None = None, root: Path = ROOT, catalogue: Catalogue | None = None) -> int:
    """Write or compare; return 1 if a document and the rows differ, 2 if a comment or a row is invalid."""
    args = _arguments(argv)
    there = catalogue or Catalogue()
    try:
        if args.names:
            return _print(args.names, there, args.rows)
        stale = [document for document in documents(root, there) if document.is_stale]
    except ServeAppError as error:
        warn(f"experiments/tables: {error}")
        return 2
    for document in stale:
        if args.check:
            print_result(_difference(document, root))
        else:
            document.path.write_text(document.after, encoding="utf-8")
            print_result(f"{document.path.relative_to(root)}: rewritten")
    if stale and args.check:
        warn(f"{len(stale)} documents differ from the rows: run experiments/tables")
        return 1
    return 0


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="experiments/tables",
        description="Writes the tables and pictures of all documents from the rows.",
    )
    parser.add_argument("names", nargs="*", metavar="NAME", help="print these experiments' tables instead")
    parser.add_argument("--check", action="store_true", help="write nothing, fail when a table differs")
    parser.add_argument("--rows", type=Path, help="print from this file of rows (one NAME)")
    args = parser.parse_args(argv)
    if args.rows is not None and len(args.names) != 1:
        parser.error("--rows needs exactly one NAME")
    return args


def _print(names: Sequence[str], there: Catalogue, path: Path | None) -> int:
    for name in names:
        rows = read_rows(path or there.results(name))
        for title, table in there.tables(name).items():
            print_result(f"{name}/{title}\n\n{table.written(rows)}\n")
    return 0


def _difference(document: Document, root: Path) -> str:
    name = str(document.path.relative_to(root))
    lines = unified_diff(
        document.before.splitlines(),
        document.after.splitlines(),
        name,
        f"{name} from the rows",
        lineterm="",
        n=0,
    )
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
