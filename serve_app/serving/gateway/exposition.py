"""Pages of metrics in Prometheus' formats: merged, and converted to OpenMetrics.

Pages are merged, because scrapers reject a page that describes a metric twice or separates its samples.
Exemplars exist in the OpenMetrics format only. The gateway renders its own page in that format. Pages of
schedulers have no exemplars and are converted: the formats differ in counter names and the end marker.
"""

from collections.abc import Iterable, Iterator

# Suffixes that the text format appends to a metric's name in its samples.
_SUFFIXES = frozenset({"", "_total", "_created", "_bucket", "_sum", "_count", "_info"})
_END = "# EOF\n"


def merge(pages: Iterable[str]) -> str:
    """Merge pages so that each metric occurs once; for equal labels, the first sample is used."""
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


def merge_openmetrics(own: str, pages: Iterable[str]) -> str:
    """Merge a page in the OpenMetrics format with pages in the text format."""
    return merge((own, *map(as_openmetrics, pages))) + _END


def as_openmetrics(page: str) -> str:
    """Convert a page from the text format to OpenMetrics, without the end marker."""
    return "".join(f"{line}\n" for line in _rewritten(page.splitlines()))


def _rewritten(lines: Iterable[str]) -> Iterator[str]:
    help_of: dict[str, str] = {}
    skipped = ""
    for line in lines:
        words = line.split(" ", 3)
        if line.startswith("# HELP ") and len(words) > 2:
            # Written with the type, because the type decides the name.
            help_of[words[2]] = words[3] if len(words) > 3 else ""
        elif line.startswith("# TYPE ") and len(words) > 3:
            name, kind = words[2], words[3]
            # In both formats these are samples of a counter or histogram, so the name is reserved.
            skipped = name if name.endswith("_created") and kind == "gauge" else ""
            if not skipped:
                yield from _head(name, kind, help_of.get(name))
        elif line.strip() and not line.startswith("#") and not (skipped and line.startswith(skipped)):
            yield line


def _head(name: str, kind: str, text: str | None) -> Iterator[str]:
    """Yield a metric's description; OpenMetrics names a counter without the `_total` of its samples."""
    if kind == "counter":
        name, kind = (name.removesuffix("_total"), kind) if name.endswith("_total") else (name, "unknown")
    elif kind == "untyped":
        kind = "unknown"
    if text is not None:
        escaped = text.replace('"', '\\"')
        yield f"# HELP {name} {escaped}"
    yield f"# TYPE {name} {kind}"


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
    """Return the metric of a sample: the one described last (x_bucket belongs to x), or a new one."""
    name = line.partition("{")[0].partition(" ")[0]
    if current is not None and name.removeprefix(current.name) in _SUFFIXES:
        return current
    return families.setdefault(name, _Family(name))
