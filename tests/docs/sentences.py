"""Sentences of documents, and how long they are."""

import re
from collections.abc import Iterator

MAX_WORDS = 30

_END = re.compile(r"(?<=[.!?])[\"')\]*]*\s+(?=[\"'(\[*`±<>A-Z0-9])")
_ABBREVIATION = re.compile(r"\b(e\.g|i\.e|vs|cf|approx|Eq|Fig|No)\.\s")


def sentences(text: str) -> Iterator[str]:
    """The sentences of a paragraph. Abbreviations do not end one; colons and semicolons do not either."""
    for sentence in _END.split(_ABBREVIATION.sub(r"\1 ", " ".join(text.split()))):
        if sentence:
            yield sentence


def words(sentence: str) -> int:
    """How many words it has: what stands between spaces and holds a letter or digit; a code span is one."""
    return sum(any(sign.isalnum() for sign in word) for word in sentence.split())
