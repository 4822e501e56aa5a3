"""`experiments/tables`: writes the tables of README.md and docs from the rows, or says where they differ."""

import argparse
import sys
from collections.abc import Sequence
from difflib import unified_diff
from pathlib import Path

from experiments.common.catalogue import Catalogue
from experiments.common.documents import Document, documents
from experiments.common.rows import read_rows
from serve_app.command import say, warn
from serve_app.errors import ServeAppError

ROOT = Path(__file__).resolve().parents[2]


def main(argv: Sequence[str] | None = None, root: Path = ROOT, catalogue: Catalogue | None = None) -> int:
    """Write or compare; 1 when a document and the rows differ, 2 when a comment or a row cannot be read."""
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
            say(_difference(document, root))
        else:
            document.path.write_text(document.after, encoding="utf-8")
            say(f"{document.path.relative_to(root)}: written anew")
    if stale and args.check:
        warn(f"{len(stale)} documents differ from the rows: run experiments/tables")
        return 1
    return 0


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="experiments/tables",
        description="Writes the tables of README.md, docs and the experiments' own pages from the rows.",
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
            say(f"{name}/{title}\n\n{table.written(rows)}\n")
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
