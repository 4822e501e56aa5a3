"""Strings that match regular expressions."""

import random
import re

import pytest

from serve_app.engines.emulated.content.patterns import PatternError, matching


@pytest.mark.parametrize(
    "pattern",
    [
        r"\d{3}-[a-f]+!",
        r"[A-Z][a-z]{2,}",
        r"(a|b)\1",
        r"(?P<x>ab?)(?P=x)",
        r'[^"\\]*',
        r"\w+@\w+\.(com|org)",
        r"(\([0-9]{3}\))?[0-9]{3}-[0-9]{4}",
        r"a*?b+?c??",
        r"[\u4e00-\u9fff]{2}",
        r"\S+\s\D\W",
        r"(?i)yes|no",
        r"(?>ab)c{2}+",
        r"(a)?(?(1)b|c)",
        r".{5}",
        "",
    ],
)
def test_what_is_made_matches(pattern: str) -> None:
    for seed in range(30):
        assert re.fullmatch(pattern, matching(pattern, random.Random(seed)))


@pytest.mark.parametrize("pattern", ["(a", "a{30000}", "(a{300}){300}", "[z-a]", "*"])
def test_a_pattern_that_is_invalid_or_too_long_is_refused(pattern: str) -> None:
    with pytest.raises(PatternError):
        matching(pattern, random.Random(0))
