"""Strings that match a regular expression.

The pattern is parsed by Python's own parser. The libraries that do this (rstr, exrex) have had no release
for a year or more, walk the same parse tree, and depend on the hash seed or on global randomness.
"""

import importlib
import random
import re
import string
from collections.abc import Callable, Sequence
from typing import Any

# Python's own, which has no types.
_parser = importlib.import_module("re._parser")
# Repetitions beyond the least that a pattern asks for: `.*` is a word, not a page.
_EXTRA_REPEATS = 6
# Longest string that a pattern may ask for.
_MAX_CHARACTERS = 20_000
_PRINTABLE = string.ascii_letters + string.digits + " _-.,:;!?/()'"
_CATEGORIES = {
    "CATEGORY_DIGIT": string.digits,
    "CATEGORY_NOT_DIGIT": string.ascii_letters,
    "CATEGORY_SPACE": " ",
    "CATEGORY_NOT_SPACE": string.ascii_letters + string.digits,
    "CATEGORY_WORD": string.ascii_lowercase + string.digits,
    "CATEGORY_NOT_WORD": " -.,",
}


class PatternError(ValueError):
    """A pattern that is invalid, or whose matches this module cannot make."""


def matching(pattern: str, rng: random.Random) -> str:
    """A string in which the pattern matches.

    Lookarounds and some uses of anchors are beyond it: the caller checks the result.

    Raises:
        PatternError: the pattern is invalid or asks for too much.
    """
    try:
        parsed = _parser.parse(pattern)
    except (re.error, RecursionError, OverflowError) as error:
        raise PatternError(f"{error}") from error
    return _Walk(rng).sequence(parsed)


class _Walk:
    """Writes one match, node by node."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        self._groups: dict[int, str] = {}
        self._characters = 0

    def sequence(self, nodes: Sequence[tuple[Any, Any]]) -> str:
        return "".join(self._node(str(code), value) for code, value in nodes)

    def _node(self, code: str, value: Any) -> str:
        handlers: dict[str, Callable[[Any], str]] = {
            "LITERAL": lambda value: self._one(chr(value)),
            "NOT_LITERAL": lambda value: self._one(_PRINTABLE.replace(chr(value), "")),
            "ANY": lambda _: self._one(string.ascii_lowercase),
            "IN": lambda value: self._one(_members(value)),
            "CATEGORY": lambda value: self._one(_CATEGORIES[str(value)]),
            "BRANCH": lambda value: self.sequence(self._rng.choice(value[1])),
            "SUBPATTERN": self._group,
            "ATOMIC_GROUP": self.sequence,
            "GROUPREF": lambda value: self._groups.get(value, ""),
            "GROUPREF_EXISTS": lambda value: self.sequence(
                value[1] if value[0] in self._groups else value[2] or ()
            ),
            "MAX_REPEAT": self._repeat,
            "MIN_REPEAT": self._repeat,
            "POSSESSIVE_REPEAT": self._repeat,
            "AT": lambda _: "",
            # A lookahead's text belongs to what follows it: the rest of the pattern has to bring it.
            "ASSERT": lambda _: "",
            "ASSERT_NOT": lambda _: "",
        }
        handler = handlers.get(code)
        if handler is None:
            raise PatternError(f"{code.lower()} is not supported")
        return handler(value)

    def _one(self, characters: Sequence[str]) -> str:
        self._characters += 1
        if self._characters > _MAX_CHARACTERS:
            raise PatternError(f"its matches are longer than {_MAX_CHARACTERS} characters")
        if not characters:
            raise PatternError("a set of characters is empty")
        return self._rng.choice(characters)

    def _group(self, value: Any) -> str:
        text = self.sequence(value[-1])
        if value[0] is not None:
            self._groups[value[0]] = text
        return text

    def _repeat(self, value: Any) -> str:
        least, most, nodes = value
        times = self._rng.randint(int(least), min(int(most), int(least) + _EXTRA_REPEATS))
        if times > _MAX_CHARACTERS:
            raise PatternError(f"its matches are longer than {_MAX_CHARACTERS} characters")
        return "".join(self.sequence(nodes) for _ in range(times))


def _members(items: Sequence[tuple[Any, Any]]) -> str:
    """The characters of a set; those of a negated set are printable."""
    negated = str(items[0][0]) == "NEGATE"
    characters: dict[str, None] = {}
    for code, value in items[1:] if negated else items:
        match str(code):
            case "LITERAL":
                characters[chr(value)] = None
            case "RANGE":
                # A wide range is cut: its first characters stand for all of them.
                first, last = value
                characters.update(dict.fromkeys(map(chr, range(first, min(last, first + 255) + 1))))
            case "CATEGORY":
                characters.update(dict.fromkeys(_CATEGORIES[str(value)]))
    if negated:
        return "".join(item for item in _PRINTABLE if item not in characters)
    # Letters and digits where the set has any: `\S` and wide ranges would else bring odd symbols.
    plain = "".join(item for item in characters if item.isalnum())
    return plain if len(characters) > 100 and plain else "".join(characters)
