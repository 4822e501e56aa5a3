"""Joining of metrics in the Prometheus text format that come from several places.

Each scheduler writes its own page, and two pages that describe the same metric may not simply follow each
other: a scraper refuses a metric that is described twice or whose samples lie apart.
"""

from collections.abc import Iterable

# What the text format appends to a metric's name in its samples.
_SUFFIXES = frozenset({"", "_total", "_created", "_bucket", "_sum", "_count", "_info"})


def merge(pages: Iterable[str]) -> str:
    """One page with every metric once and its samples together; of equal labels the first sample counts."""
    families: dict[str, _Family] = {}
    for page in pages:
        family: _Family | None = None
        for line in page.splitlines():
            if not line.strip():
                continue
            if line.startswith("#"):
                family = _described(families, line) or family
            else:
                family = _owner(families, family, line)
                family.samples.setdefault(line.rpartition(" ")[0] or line, line)
    return "".join(family.text() for family in families.values())


class _Family:
    """A metric: its description and its samples."""

    __slots__ = ("comments", "name", "samples")

    def __init__(self, name: str) -> None:
        self.name = name
        self.comments: dict[str, str] = {}
        self.samples: dict[str, str] = {}

    def text(self) -> str:
        return "".join(f"{line}\n" for line in (*self.comments.values(), *self.samples.values()))


def _described(families: dict[str, _Family], line: str) -> _Family | None:
    words = line.split(" ", 3)
    if len(words) < 3 or words[1] not in ("HELP", "TYPE"):
        return None
    family = families.setdefault(words[2], _Family(words[2]))
    family.comments.setdefault(words[1], line)
    return family


def _owner(families: dict[str, _Family], current: _Family | None, line: str) -> _Family:
    """The metric a sample belongs to: the one just described (x_bucket belongs to x), or one of its own."""
    name = line.partition("{")[0].partition(" ")[0]
    if current is not None and name.removeprefix(current.name) in _SUFFIXES:
        return current
    return families.setdefault(name, _Family(name))
