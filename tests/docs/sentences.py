"""Sentences of documents, and their length."""

import re
from collections.abc import Iterator

MAX_WORDS = 30

_END = re.compile(r"(?<=[.!?])[\"')\]*]*\s+(?=[\"'(\[*`±<>A-Z0-9])")
_ABBREVIATION = re.compile(r"\b(e\.g|i\.e|vs|cf|approx|Eq|Fig|No)\.\s")


def sentences(text: str) -> Iterator[str]:
    """Yield the sentences of a paragraph. Abbreviations, colons and semicolons do not end a sentence."""
    for sentence in _END.split(_ABBREVIATION.sub(r"\1 ", " ".join(text.split()))):
        if sentence:
            yield sentence


def words(sentence: str) -> int:
    """Count the words with a letter or digit; a code span counts as one."""
    return sum(any(sign.isalnum() for sign in word) for word in sentence.split())
