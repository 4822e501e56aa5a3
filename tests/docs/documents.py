"""Documents and their parts: code blocks, paragraphs, links, headings."""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from markdown_it import MarkdownIt
from markdown_it.token import Token

ROOT = Path(__file__).resolve().parents[2]

_PATTERNS = ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "docs/**/*.md", "experiments/**/README.md")
_MARK = re.compile(r"<!--\s*test:\s*(.+?)\s*-->\s*\Z")
_PARSER = MarkdownIt("commonmark").enable("table")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Part:
    document: str
    line: int

    @property
    def place(self) -> str:
        """Return file and line, as editors and terminals link them."""
        return f"{self.document}:{self.line}"


@dataclass(frozen=True, slots=True, kw_only=True)
class CodeBlock(_Part):
    """A fenced or indented block of code.

    Attributes:
        language: the first word after the fence; empty for an indented block.
        mark: text of the comment `<!-- test: ... -->` directly before the block; empty without one.
    """

    language: str
    text: str
    mark: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Passage(_Part):
    """A paragraph, the text of a list item, a heading, or a row of a table.

    Attributes:
        kind: `paragraph`, `heading` or `table`.
        text: plain text without markup.
        code: the code spans.
        links: targets of links and images.
    """

    kind: str
    text: str
    code: tuple[str, ...]
    links: tuple[str, ...]


def documents() -> list[str]:
    """Return the paths of all documents below the root."""
    return sorted({str(path.relative_to(ROOT)) for each in _PATTERNS for path in ROOT.glob(each)})


@cache
def code_blocks(document: str) -> tuple[CodeBlock, ...]:
    """Return all code blocks, in order."""
    return tuple(blocks_in(document, (ROOT / document).read_text(encoding="utf-8")))


def blocks_in(document: str, text: str) -> Iterator[CodeBlock]:
    """Yield the code blocks of a text."""
    mark = ""
    for token in _PARSER.parse(text):
        if token.type == "html_block":
            found = _MARK.search(token.content)
            mark = found[1] if found else ""
        elif token.type in {"fence", "code_block"}:
            words = token.info.split()
            yield CodeBlock(
                document=document,
                line=_line(token),
                language=words[0] if words else "",
                text=token.content,
                mark=mark,
            )
            mark = ""
        elif token.nesting >= 0:
            mark = ""


@cache
def passages(document: str) -> tuple[Passage, ...]:
    """Return all passages, in order."""
    return tuple(_passages_in(document))


def _passages_in(document: str) -> Iterator[Passage]:
    around: list[str] = []
    for token in _PARSER.parse((ROOT / document).read_text(encoding="utf-8")):
        if token.nesting:
            around = [*around, token.type] if token.nesting > 0 else around[:-1]
        elif token.type == "inline":
            children = token.children or []
            yield Passage(
                document=document,
                line=_line(token),
                kind=_kind(around),
                text="".join(map(_read, children)),
                code=tuple(child.content for child in children if child.type == "code_inline"),
                links=tuple(_target(child) for child in children if child.type in {"link_open", "image"}),
            )


def heading_anchors(document: str) -> set[str]:
    """Return the fragments by which a repository's page links to a document's headings."""
    anchors: set[str] = set()
    for passage in passages(document):
        if passage.kind == "heading":
            slug = re.sub(r"[^\w\- ]", "", passage.text.lower()).replace(" ", "-")
            taken = sum(known == slug or known.startswith(f"{slug}-") for known in anchors)
            anchors.add(f"{slug}-{taken}" if slug in anchors else slug)
    return anchors


def _line(token: Token) -> int:
    assert token.map is not None, "blocks know their lines"
    return token.map[0] + 1


def _kind(around: list[str]) -> str:
    if "table_open" in around:
        return "table"
    return "heading" if around and around[-1] == "heading_open" else "paragraph"


def _read(child: Token) -> str:
    if child.type in {"softbreak", "hardbreak"}:
        return " "
    return child.content if child.type in {"text", "image", "code_inline"} else ""


def _target(child: Token) -> str:
    return str(child.attrGet("href" if child.type == "link_open" else "src") or "")
