"""Report parser: elements, text, and tables by caption."""

from dataclasses import dataclass, field
from html.parser import HTMLParser

VOID = {"meta", "input", "br", "line", "circle", "polygon"}


@dataclass
class ParsedTable:
    """Rows of cells; `values` has the unrounded figures, None for text cells."""

    caption: str = ""
    texts: list[list[str]] = field(default_factory=list)
    values: list[list[float | None]] = field(default_factory=list)

    def column(self, heading: str) -> dict[str, float | None]:
        """Return the values under a heading, by the first cell of their row."""
        place = self.texts[0].index(heading)
        return {
            texts[0]: values[place] for texts, values in zip(self.texts[1:], self.values[1:], strict=True)
        }


class ParsedReport(HTMLParser):
    """HTML parser that fails on elements closed in the wrong order."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.texts: list[tuple[tuple[str, ...], str]] = []
        self.tables: list[ParsedTable] = []
        self._open: list[str] = []
        self.feed(page)
        self.close()
        assert self._open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        if tag not in VOID:
            self._open.append(tag)
        if tag == "table":
            self.tables.append(ParsedTable())
        elif tag == "tr":
            self.tables[-1].texts.append([])
            self.tables[-1].values.append([])
        elif tag in {"th", "td"}:
            self.tables[-1].texts[-1].append("")
            self.tables[-1].values[-1].append(None)
        elif tag == "data":
            self.tables[-1].values[-1][-1] = float(dict(attrs)["value"] or "nan")

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.texts.append((tuple(self._open), data))
        if "caption" in self._open:
            self.tables[-1].caption += data
        elif {"td", "th"} & set(self._open) and not {"svg", "small"} & set(self._open):
            self.tables[-1].texts[-1][-1] = (self.tables[-1].texts[-1][-1] + data).strip()

    def inside(self, tag: str) -> list[str]:
        """Return the texts directly inside elements of this name."""
        return [text for within, text in self.texts if within and within[-1] == tag]

    @property
    def text(self) -> str:
        """Return the text that a reader sees without scripts."""
        seen = (text for within, text in self.texts if not {"script", "style"} & set(within))
        return " ".join(" ".join(seen).split())

    def table(self, beginning: str) -> ParsedTable:
        """Return the only table whose caption begins like this."""
        (found,) = [table for table in self.tables if table.caption.startswith(beginning)]
        return found
