"""Smallest JSON value that a schema accepts, and shortest text that a regular expression matches.

A value has what its schema requires and nothing else: no optional properties, the fewest items, the shortest
strings, numbers close to zero. The keywords that structured outputs use are built directly, and `jsonschema`,
a dependency of Ray, validates every part. A schema for which no valid value is found is rejected, such as one
whose `if` or `contains` requires more than that.
"""

import functools
import importlib
import itertools
import json
import math
import re
import string
from collections.abc import Callable, Iterator, Mapping, Sequence
from fractions import Fraction
from typing import Any

Schema = dict[str, Any]

# Python's own parser of regular expressions, which has no type annotations.
_re_parser = importlib.import_module("re._parser")
# Attempts per part of a value: the smallest one, then the next larger ones.
_ATTEMPTS = 4
_MAX_DEPTH = 60
# Limit on built parts and tried combinations, which terminates on recursive schemas.
_MAX_STEPS = 10_000
_MAX_LENGTH = 20_000
_UNBOUNDED = 10**18
# Keywords that imply the type of a schema without `type`.
_HINTS = {
    "object": ("properties", "required", "minProperties"),
    "array": ("items", "prefixItems", "minItems"),
    "string": ("minLength", "maxLength", "pattern", "format"),
    "number": ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"),
}
_FORMATS = {
    "date": "2000-01-01",
    "time": "00:00:00Z",
    "date-time": "2000-01-01T00:00:00Z",
    "duration": "PT0S",
    "email": "a@example.com",
    "hostname": "example.com",
    "ipv4": "192.0.2.1",
    "ipv6": "::",
    "uuid": "00000000-0000-4000-8000-000000000000",
    "uri": "https://example.com",
}


class UnsatisfiableError(ValueError):
    """A schema or pattern that is invalid, matches nothing, or is not supported."""


class _LimitError(UnsatisfiableError):
    """The step limit is exceeded; no further alternatives are tried."""


@functools.lru_cache(maxsize=256)
def smallest_json(schema: str) -> str:
    """Return the smallest JSON document that a schema, given as JSON, accepts.

    Raises:
        UnsatisfiableError: no such document was found.
    """
    read = json.loads(schema)
    try:
        return json.dumps(_Builder(read).value(read, 0), ensure_ascii=False)
    except RecursionError as error:
        raise UnsatisfiableError("its references form a circle") from error


class _Builder:
    """Builder of values for the parts of one schema."""

    def __init__(self, root: Any) -> None:
        self._root = root
        self._accepts = _validator(root)
        self._steps = 0
        self._makers: Mapping[str, Callable[[Schema, int, int], Any]] = {
            "object": self._object,
            "array": self._array,
            "string": lambda flat, _depth, larger: _string(flat, larger),
            "integer": lambda flat, _depth, larger: _number(flat, larger, integral=True),
            "number": lambda flat, _depth, larger: _number(flat, larger, integral=False),
            "boolean": lambda _flat, _depth, larger: bool(larger % 2),
            "null": lambda _flat, _depth, _larger: None,
        }

    def value(self, schema: Any, depth: int) -> Any:
        """Return the smallest value of a part of the schema."""
        self._count_step()
        if depth > _MAX_DEPTH:
            raise UnsatisfiableError(f"its values nest deeper than {_MAX_DEPTH} levels")
        problem = UnsatisfiableError("no value was found that it accepts")
        for flat in self._alternatives((schema,), {}):
            for larger in range(_ATTEMPTS):
                try:
                    made = self._make(flat, depth, larger)
                except _LimitError:
                    raise
                except UnsatisfiableError as error:
                    problem = error
                    break
                if self._accepts(schema, made):
                    return made
        raise problem

    def _count_step(self) -> None:
        self._steps += 1
        if self._steps > _MAX_STEPS:
            raise _LimitError(f"a value takes more than {_MAX_STEPS} steps to build")

    def _alternatives(self, parts: tuple[Any, ...], merged: Schema) -> Iterator[Schema]:
        """Yield schemas without references and combinators, one per choice of branches, small ones first."""
        while parts:
            self._count_step()
            part, parts = parts[0], parts[1:]
            if part is True:
                continue
            if part is False:
                return
            rest = dict(part)
            if "$ref" in rest:
                parts = (self._target(rest.pop("$ref")), *parts)
            parts = (*rest.pop("allOf", ()), *parts)
            branches = [sorted(rest.pop(name), key=_size) for name in ("anyOf", "oneOf") if name in rest]
            merged = _merge(merged, rest)
            if branches:
                for chosen in itertools.product(*branches):
                    yield from self._alternatives((*chosen, *parts), merged)
                return
        yield merged

    def _target(self, reference: str) -> Any:
        if reference != "#" and not reference.startswith("#/"):
            raise UnsatisfiableError(f"reference {reference!r} is not a path within the schema")
        found = self._root
        for step in reference.split("/")[1:]:
            key = step.replace("~1", "/").replace("~0", "~")
            try:
                found = found[int(key)] if isinstance(found, list) else found[key]
            except (KeyError, IndexError, ValueError, TypeError) as error:
                raise UnsatisfiableError(f"reference {reference!r} leads nowhere") from error
        return found

    def _make(self, flat: Schema, depth: int, larger: int) -> Any:
        if "const" in flat:
            return flat["const"]
        if "enum" in flat:
            return flat["enum"][larger % len(flat["enum"])]
        kind = flat.get("type")
        if isinstance(kind, list):
            kind = "null" if "null" in kind else kind[0]
        if kind is None:
            hinted = (name for name, keywords in _HINTS.items() if not flat.keys().isdisjoint(keywords))
            kind = next(hinted, "null")
        return self._makers[kind](flat, depth, larger)

    def _object(self, flat: Schema, depth: int, _larger: int) -> dict[str, Any]:
        properties: Schema = flat.get("properties", {})
        required = flat.get("required", ())
        names = [name for name in properties if name in required]
        names += [name for name in required if name not in properties]
        spare = itertools.chain(
            (name for name in properties if name not in required), map("p{}".format, itertools.count())
        )
        while len(names) < flat.get("minProperties", 0):
            self._count_step()
            names.append(next(spare))
        free = flat.get("additionalProperties", True)
        return {name: self.value(properties.get(name, free), depth + 1) for name in names}

    def _array(self, flat: Schema, depth: int, larger: int) -> list[Any]:
        items, first = flat.get("items", True), flat.get("prefixItems", [])
        if isinstance(items, list):  # before draft 2020-12
            items, first = flat.get("additionalItems", True), items
        count = flat.get("minItems", 0) + larger
        if count > _MAX_STEPS:
            raise UnsatisfiableError(f"minItems is {count}, the most is {_MAX_STEPS}")
        return [self.value(schema, depth + 1) for schema in (*first[:count], *[items] * (count - len(first)))]


def _validator(root: Any) -> Callable[[Any, Any], bool]:
    """Return a validator of values for parts of a schema. References to other documents are never fetched."""
    import jsonschema  # type: ignore[import-untyped] # noqa: PLC0415 - costs a third of a second
    import referencing  # noqa: PLC0415

    kind = jsonschema.validators.validator_for(root, default=jsonschema.Draft202012Validator)
    try:
        kind.check_schema(root)
    except jsonschema.SchemaError as error:
        raise UnsatisfiableError(error.message) from error
    whole = kind(root, registry=referencing.Registry(), format_checker=kind.FORMAT_CHECKER)

    def accepts(schema: Any, value: Any) -> bool:
        try:
            return bool(whole.evolve(schema=schema).is_valid(value))
        except referencing.exceptions.Unresolvable as error:
            raise UnsatisfiableError(f"a reference cannot be followed: {error}") from error

    return accepts


def _size(branch: Any) -> int:
    """Rank a branch by how large its values may become: scalar, structure, possibly recursive reference."""
    if "$ref" in str(branch):
        return 2
    kind = branch.get("type") if isinstance(branch, Mapping) else None
    return 1 if kind in ("object", "array") else 0


def _merge(old: Schema, new: Schema) -> Schema:
    """Return a schema for values that both accept. The validator checks keywords not intersected here."""
    merged = {**old, **new}
    for name in old.keys() & new.keys():
        first, second = old[name], new[name]
        match name:
            case "required":
                merged[name] = list(dict.fromkeys([*first, *second]))
            case "enum":
                merged[name] = [value for value in first if value in second]
            case "type":
                ones, others = ([kinds] if isinstance(kinds, str) else kinds for kinds in (first, second))
                merged[name] = [kind for kind in ones if kind in others]
            case "properties":
                both = {key: {"allOf": [first[key], second[key]]} for key in first.keys() & second.keys()}
                merged[name] = {**first, **second, **both}
            case "items" | "additionalProperties":
                merged[name] = {"allOf": [first, second]}
            case "minimum" | "exclusiveMinimum" | "minLength" | "minItems" | "minProperties":
                merged[name] = max(first, second)
            case "maximum" | "exclusiveMaximum":
                merged[name] = min(first, second)
    if [] in (merged.get("enum"), merged.get("type")):
        raise UnsatisfiableError("parts of it contradict each other")
    return merged


def _number(flat: Schema, larger: int, *, integral: bool) -> int | float:
    """Return the number closest to zero within the bounds, or a few steps from it."""
    low = max(_bounds(flat, "minimum", "exclusiveMinimum"), default=-_UNBOUNDED)
    high = min(_bounds(flat, "maximum", "exclusiveMaximum"), default=_UNBOUNDED)
    # Parse the decimal text, because a float's exact fraction would not be what the schema's author meant.
    step = Fraction(str(flat.get("multipleOf", 1)))
    if integral:
        # Least common multiple of the step and 1.
        step = Fraction(step.numerator)
    times = min(max(0, math.ceil(low / step)), math.floor(high / step))
    times += larger if (times + larger) * step <= high else -larger
    value = times * step
    if not integral and not low <= value <= high:
        value = Fraction(low + high) / 2
    return int(value) if value.denominator == 1 else float(value)


def _bounds(flat: Schema, *names: str) -> list[Any]:
    """Return the bounds of these names. In draft 4 exclusive bounds are flags, which the validator checks."""
    return [flat[name] for name in names if name in flat and not isinstance(flat[name], bool)]


def _check_length(characters: int) -> None:
    if characters > _MAX_LENGTH:
        raise UnsatisfiableError(f"it takes strings longer than {_MAX_LENGTH} characters")


def _string(flat: Schema, larger: int) -> str:
    least = flat.get("minLength", 0)
    _check_length(least)
    if "pattern" in flat:
        text = shortest_match(flat["pattern"], larger)
        return text if len(text) >= least else shortest_match(flat["pattern"], least)
    return _FORMATS.get(flat.get("format", "")) or "a" * (int(least) + larger)


# -- regular expressions ----------------------------------------------------------------------------------

_PRINTABLE = string.ascii_lowercase + string.digits + string.ascii_uppercase + " _-.,:;!?/()'"
_CATEGORIES = {
    "CATEGORY_DIGIT": r"\d",
    "CATEGORY_NOT_DIGIT": r"\D",
    "CATEGORY_SPACE": r"\s",
    "CATEGORY_NOT_SPACE": r"\S",
    "CATEGORY_WORD": r"\w",
    "CATEGORY_NOT_WORD": r"\W",
}


def shortest_match(pattern: str, extra: int = 0) -> str:
    """Return approximately the shortest string that a pattern matches.

    Lookarounds and some uses of anchors are not supported, so the caller must check the result.

    Args:
        extra: repetitions beyond the minimum, for longer matches.

    Raises:
        UnsatisfiableError: the pattern is invalid or requires too much.
    """
    try:
        return _Match(extra).sequence(_re_parser.parse(pattern))
    except (re.error, RecursionError, OverflowError) as error:
        raise UnsatisfiableError(f"{error}") from error


class _Match:
    """Writer of one match, node by node of the parsed pattern."""

    def __init__(self, extra: int) -> None:
        self._extra = extra
        self._groups: dict[int | None, str] = {}

    def sequence(self, nodes: Sequence[tuple[Any, Any]]) -> str:
        text = "".join(self._node(str(code), value) for code, value in nodes)
        _check_length(len(text))
        return text

    def _node(self, code: str, value: Any) -> str:
        # A lookahead adds no text: the rest of the pattern has to match it.
        text = ""
        match code:
            case "LITERAL":
                text = chr(value)
            case "ANY":
                text = "a"
            case "NOT_LITERAL":
                text = _member([("NEGATE", None), ("LITERAL", value)])
            case "IN":
                text = _member(value)
            case "BRANCH":
                text = min((self.sequence(branch) for branch in value[1]), key=len)
            case "SUBPATTERN":
                text = self._groups[value[0]] = self.sequence(value[-1])
            case "GROUPREF":
                text = self._groups.get(value, "")
            case "MAX_REPEAT" | "MIN_REPEAT":
                least, most, nodes = value
                times = min(int(most), int(least) + self._extra)
                once = self.sequence(nodes) if times else ""
                _check_length(len(once) * times)
                text = once * times
            case "AT" | "ASSERT" | "ASSERT_NOT":
                pass
            case _:
                raise UnsatisfiableError(f"{code.lower()} is not supported")
        return text


def _member(items: Sequence[tuple[Any, Any]]) -> str:
    """Return the first plain character of a set, or one that the set names."""
    negated = str(items[0][0]) == "NEGATE"
    named = [(str(code), value) for code, value in items[negated:]]
    others = [chr(value if code == "LITERAL" else value[0]) for code, value in named if code != "CATEGORY"]
    for character in (*_PRINTABLE, *others):
        if negated != any(_is_in(character, code, value) for code, value in named):
            return str(character)
    raise UnsatisfiableError("a set of characters is empty")


def _is_in(character: str, code: str, value: Any) -> bool:
    if code == "CATEGORY":
        return re.fullmatch(_CATEGORIES[str(value)], character) is not None
    first, last = (value, value) if code == "LITERAL" else value
    return bool(first <= ord(character) <= last)
