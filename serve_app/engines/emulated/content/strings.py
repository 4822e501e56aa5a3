"""Strings of a JSON schema: words within length limits, strings of a format, strings that match a pattern."""

import random
import uuid
from collections.abc import Callable
from typing import Any

from serve_app.engines.emulated.content.patterns import matching
from serve_app.engines.emulated.text import WORDS

# Words of a string whose length the schema leaves open.
_WORDS = (1, 4)
# Longest string that a schema may ask for.
MAX_CHARACTERS = 20_000


class NoStringError(ValueError):
    """Limits that no string meets, or that ask for too long a string."""


def text(schema: dict[str, Any], rng: random.Random) -> str:
    """A string for the schema; the caller checks it where pattern or format stand beside lengths.

    Raises:
        NoStringError: the lengths contradict each other, or are too long.
        PatternError: the pattern is invalid or asks for too much.
    """
    least, most = int(schema.get("minLength", 0)), schema.get("maxLength")
    if least > MAX_CHARACTERS:
        raise NoStringError(f"minLength is {least}, the most is {MAX_CHARACTERS}")
    if most is not None and least > most:
        raise NoStringError(f"minLength {least} is above maxLength {most}")
    if isinstance(schema.get("pattern"), str):
        return matching(schema["pattern"], rng)
    make = FORMATS.get(schema.get("format", ""))
    return make(rng) if make is not None else words(rng, least, most)


def words(rng: random.Random, least: int = 0, most: int | None = None) -> str:
    """Words, of so many characters at least and at most."""
    chosen = " ".join(rng.choice(WORDS) for _ in range(rng.randint(*_WORDS)))
    while len(chosen) < least:
        chosen += " " + rng.choice(WORDS)
    if most is not None and len(chosen) > most:
        chosen = chosen[:most]
        # A cut that leaves a space at the end looks wrong; a letter does as well.
        chosen = chosen[:-1] + "s" if chosen.endswith(" ") else chosen
    return chosen


def word(rng: random.Random) -> str:
    """One word."""
    return rng.choice(WORDS)


def _date(rng: random.Random) -> str:
    return f"20{rng.randint(10, 39)}-{rng.randint(1, 12):02}-{rng.randint(1, 28):02}"


def _time(rng: random.Random) -> str:
    return f"{rng.randint(0, 23):02}:{rng.randint(0, 59):02}:{rng.randint(0, 59):02}Z"


def _uri(rng: random.Random) -> str:
    return f"https://{word(rng)}.example.com/{word(rng)}"


FORMATS: dict[str, Callable[[random.Random], str]] = {
    "date": _date,
    "time": _time,
    "date-time": lambda rng: f"{_date(rng)}T{_time(rng)}",
    "duration": lambda rng: f"PT{rng.randint(1, 59)}M",
    "email": lambda rng: f"{word(rng)}@example.com",
    "idn-email": lambda rng: f"{word(rng)}@example.com",
    "hostname": lambda rng: f"{word(rng)}.example.com",
    "idn-hostname": lambda rng: f"{word(rng)}.example.com",
    "ipv4": lambda rng: f"192.0.2.{rng.randint(1, 254)}",
    "ipv6": lambda rng: f"2001:db8::{rng.randint(1, 0xFFFF):x}",
    "uuid": lambda rng: str(uuid.UUID(int=rng.getrandbits(128), version=4)),
    "uri": _uri,
    "uri-reference": lambda rng: f"/{word(rng)}",
    "uri-template": lambda rng: f"/{word(rng)}/{{id}}",
    "iri": _uri,
    "iri-reference": lambda rng: f"/{word(rng)}",
    "json-pointer": lambda rng: f"/{word(rng)}",
    "relative-json-pointer": lambda rng: f"{rng.randint(0, 3)}/{word(rng)}",
    "regex": lambda rng: f"{word(rng)}+",
}
