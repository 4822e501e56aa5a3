"""Tables in documents: each stands between two comments, and is written anew from the rows.

The comments are `table: NAME/TABLE`, of the experiment and its table, and `end table`; see README.md of
`experiments`.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from experiments.common.catalogue import Catalogue
from experiments.common.rows import read_rows
from serve_app.errors import SettingsError

_BEGIN = re.compile(r"<!-- table: ([a-z0-9_-]+)/([a-z0-9_-]+) -->")
_END = "<!-- end table -->"
_PLACES = ("README.md", "docs/**/*.md", "experiments/README.md", "experiments/*/README.md")


@dataclass(frozen=True, slots=True)
class Document:
    """A document whose tables can be compared with the rows.

    Attributes:
        before: as it is.
        after: as it should be.
    """

    path: Path
    before: str
    after: str

    @property
    def is_stale(self) -> bool:
        """Whether a table differs from its rows."""
        return self.before != self.after


def documents(root: Path, catalogue: Catalogue) -> Iterator[Document]:
    """Every document of a checkout that may hold tables.

    Raises:
        SettingsError: a comment names no table, or has no end.
    """
    for pattern in _PLACES:
        for path in sorted(root.glob(pattern)):
            before = path.read_text(encoding="utf-8")
            yield Document(path, before, _rewritten(before, path.relative_to(root), catalogue))


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
    return tables[table].written(read_rows(catalogue.results(name)))
