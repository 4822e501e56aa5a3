"""JSON values that a JSON schema accepts.

No library does this for production: hypothesis-jsonschema is for tests, says so at run time, and had its last
release in early 2024 like jsf, which brings a generator of fake names with it. So this samples the keywords
that people write, and `jsonschema`, which Ray depends on already, judges every value; what it cannot satisfy
is refused. `jsonschema` is imported on first use: it costs a third of a second.
"""

import math
import random
import re
from collections.abc import Callable
from typing import Any

from serve_app.engines.emulated.content.numbers import NoNumberError, number
from serve_app.engines.emulated.content.patterns import PatternError, matching
from serve_app.engines.emulated.content.schema_merge import Schema, SchemaError, SchemaMerger
from serve_app.engines.emulated.content.strings import NoStringError, text, word

# Attempts at a whole value. Most schemas take one; conditions and negations are met by chance.
_ATTEMPTS = 40
# Attempts that may fail outright: bounds that exclude everything do so each time, other branches may not.
_FAILURES = 8
# Attempts at an item that no other one equals.
_UNIQUE_ATTEMPTS = 50
# From this depth on, optional parts are left out and branches are chosen that end soon.
_SOFT_DEPTH = 4
_MAX_DEPTH = 60
# Values in one document.
_MAX_VALUES = 10_000
# An optional property is there so often.
_OPTIONAL_RATE = 0.7
# Items of an array, and free properties of an object, beyond the least.
_EXTRA_ITEMS = 2
_TYPES = ("object", "array", "string", "integer", "number", "boolean", "null")
# Keywords by which a schema without `type` shows what it is about.
_HINTS = {
    "object": ("properties", "required", "additionalProperties", "patternProperties", "minProperties"),
    "array": ("items", "prefixItems", "minItems", "maxItems", "uniqueItems", "contains"),
    "string": ("minLength", "maxLength", "pattern", "format"),
    "number": ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"),
}


def sample(schema: Any, rng: random.Random) -> Any:
    """A value that the schema accepts.

    Raises:
        SchemaError: it is invalid, accepts nothing, or is beyond this sampler.
    """
    accepts = _validator(schema)
    problems: list[str] = []
    for _ in range(_ATTEMPTS):
        try:
            value = _Draw(schema, rng).value(schema, 0)
        except (NoNumberError, NoStringError, PatternError, SchemaError) as error:
            problems.append(str(error))
            if len(problems) == _FAILURES:
                break
        else:
            if accepts(value):
                return value
    raise SchemaError(problems[-1] if problems else "no value was found that it accepts")


def _validator(schema: Any) -> Callable[[Any], bool]:
    """Judges values; references outside of the schema are never fetched."""
    import jsonschema  # type: ignore[import-untyped] # noqa: PLC0415 - costs a third of a second
    import referencing  # noqa: PLC0415

    kind = jsonschema.validators.validator_for(schema, default=jsonschema.Draft202012Validator)
    try:
        kind.check_schema(schema)
    except jsonschema.SchemaError as error:
        raise SchemaError(error.message) from error
    validator = kind(schema, registry=referencing.Registry(), format_checker=kind.FORMAT_CHECKER)

    def accepts(value: Any) -> bool:
        try:
            return bool(validator.is_valid(value))
        except (referencing.exceptions.Unresolvable, RecursionError) as error:
            raise SchemaError(f"a reference cannot be followed: {error}") from error

    return accepts


class _Draw:
    """One attempt at a value."""

    def __init__(self, root: Any, rng: random.Random) -> None:
        self._merger = SchemaMerger(root if isinstance(root, dict) else {})
        self._rng = rng
        self._values = 0
        self._makers: dict[str, Callable[[Schema, int], Any]] = {
            "object": self._object,
            "array": self._array,
            "string": lambda schema, _: text(schema, rng),
            "integer": lambda schema, _: number(schema, rng, integral=True),
            "number": lambda schema, _: number(schema, rng, integral=False),
            "boolean": lambda *_: rng.random() < 0.5,
            "null": lambda *_: None,
        }

    def value(self, schema: Any, depth: int) -> Any:
        self._values += 1
        if depth > _MAX_DEPTH:
            raise SchemaError(f"its values nest deeper than {_MAX_DEPTH} levels")
        if self._values > _MAX_VALUES:
            raise SchemaError(f"its values have more than {_MAX_VALUES} parts")
        flat = self._merger.flat(schema, self._rng, small=depth >= _SOFT_DEPTH)
        if "const" in flat:
            return flat["const"]
        if "enum" in flat:
            return self._rng.choice(flat["enum"])
        return self._makers[self._type(flat)](flat, depth)

    def _type(self, flat: Schema) -> str:
        kinds = flat.get("type")
        if isinstance(kinds, str):
            return kinds
        if kinds:
            known = [str(kind) for kind in kinds if kind in _TYPES]
            some = [kind for kind in known if kind != "null"]
            return self._rng.choice(some if some and self._rng.random() < 0.8 else known)
        for kind, names in _HINTS.items():
            if any(name in flat for name in names):
                return kind
        return self._rng.choice(("string", "integer", "boolean"))

    # -- objects --------------------------------------------------------------------------------------------

    def _object(self, flat: Schema, depth: int) -> dict[str, Any]:
        properties: dict[str, Any] = flat.get("properties", {})
        required = set(flat.get("required", ()))
        most = flat.get("maxProperties", math.inf)
        chosen = [name for name in properties if name in required or self._is_there(depth)]
        while len(chosen) > most and (optional := [name for name in chosen if name not in required]):
            chosen.remove(optional[-1])
        made = {
            name: self.value(properties[name], depth + 1) for name in chosen if properties[name] is not False
        }
        for name in sorted(required - properties.keys()):
            made[name] = self.value(self._free_schema(flat, name), depth + 1)
        self._add_dependents(flat, made, depth)
        self._add_free(flat, made, depth)
        return made

    def _is_there(self, depth: int) -> bool:
        return depth < _SOFT_DEPTH and self._rng.random() < _OPTIONAL_RATE

    def _free_schema(self, flat: Schema, name: str) -> Any:
        """The schema of a property that `properties` does not name."""
        for pattern, schema in flat.get("patternProperties", {}).items():
            if re.search(pattern, name):
                return schema
        return flat.get("additionalProperties", {"type": "string"})

    def _add_dependents(self, flat: Schema, made: dict[str, Any], depth: int) -> None:
        dependents: dict[str, list[str]] = flat.get("dependentRequired", {})
        for name in [needed for present in list(made) for needed in dependents.get(present, ())]:
            if name not in made:
                schema = flat.get("properties", {}).get(name, self._free_schema(flat, name))
                made[name] = self.value(schema, depth + 1)

    def _add_free(self, flat: Schema, made: dict[str, Any], depth: int) -> None:
        """Properties of free names: as many as are needed, and a few where nothing else is there."""
        least = flat.get("minProperties", 0)
        patterns = flat.get("patternProperties", {})
        open_ended = flat.get("additionalProperties", True) is not False
        if least > _MAX_VALUES:
            raise SchemaError(f"minProperties is {least}, the most is {_MAX_VALUES}")
        wanted = least
        if not flat.get("properties") and "properties" not in flat and depth < _SOFT_DEPTH:
            wanted = max(least, min(flat.get("maxProperties", 3), self._rng.randint(1, 3)))
        for name in (name for name in flat.get("properties", {}) if name not in made):
            if len(made) < least:
                made[name] = self.value(flat["properties"][name], depth + 1)
        for _ in range(wanted * _UNIQUE_ATTEMPTS):
            if len(made) >= wanted or not (patterns or open_ended):
                return
            name = self._free_name(flat, patterns, wanted)
            if name not in made:
                made[name] = self.value(self._free_schema(flat, name), depth + 1)

    def _free_name(self, flat: Schema, patterns: dict[str, Any], wanted: int) -> str:
        if patterns:
            pattern = self._rng.choice(list(patterns))
            name = matching(pattern, self._rng)
            # A pattern with an open end, such as `^x_`, would else give one name only.
            longer = name + word(self._rng)
            return longer if re.search(pattern, longer) else name
        if isinstance(flat.get("propertyNames"), dict):
            return str(self.value({"type": "string", **flat["propertyNames"]}, 0))
        # There are some thirty words: many properties need numbers as well.
        return word(self._rng) + (f"_{self._rng.randint(1, wanted * 10)}" if wanted > 10 else "")

    # -- arrays ---------------------------------------------------------------------------------------------

    def _array(self, flat: Schema, depth: int) -> list[Any]:
        items = flat.get("items", True)
        first = flat.get("prefixItems", [])
        if isinstance(items, list):  # before draft 2020-12
            first, items = items, flat.get("additionalItems", True)
        least, most = flat.get("minItems", 0), flat.get("maxItems", math.inf)
        if least > most:
            raise SchemaError(f"minItems {least} is above maxItems {most}")
        if least > _MAX_VALUES:
            raise SchemaError(f"minItems is {least}, the most is {_MAX_VALUES}")
        extra = 0 if depth >= _SOFT_DEPTH else self._rng.randint(0 if least else 1, _EXTRA_ITEMS)
        count = int(min(max(least, len(first)) + extra, most))
        if items is False:
            count = min(count, len(first))
        schemas = [*first[:count], *[items] * (count - len(first))]
        wanted = flat.get("minContains", 1) if "contains" in flat else 0
        # The items that must be contained stand last, where the schema leaves most freedom.
        for index in range(wanted):
            place = len(schemas) - 1 - index
            if place < 0:
                schemas.insert(0, {"allOf": [items, flat["contains"]]})
            else:
                schemas[place] = {"allOf": [schemas[place], flat["contains"]]}
        return self._items(schemas, depth, least, unique=bool(flat.get("uniqueItems")))

    def _items(self, schemas: list[Any], depth: int, least: int, *, unique: bool) -> list[Any]:
        made: list[Any] = []
        for schema in schemas:
            item = self.value(schema, depth + 1)
            for _ in range(_UNIQUE_ATTEMPTS if unique else 0):
                if item not in made:
                    break
                item = self.value(schema, depth + 1)
            if not unique or item not in made:
                made.append(item)
            elif len(schemas) <= least:
                raise SchemaError("it has too few different items")
        return made
