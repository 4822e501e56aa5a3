"""One flat schema out of references and combinations: `$ref`, `allOf`, a branch of `anyOf` and `oneOf`.

Merging is an approximation where keywords cannot be intersected (two patterns, `not`): what is drawn from the
flat schema is validated against the original one.
"""

import random
from collections.abc import Callable, Mapping
from typing import Any

Schema = dict[str, Any]

# References and combinations that one value may go through; a cycle without a value in it ends here.
_MAX_MERGES = 200
_LARGEST = ("minimum", "exclusiveMinimum", "minLength", "minItems", "minProperties", "minContains")
_LEAST = ("maximum", "exclusiveMaximum", "maxLength", "maxItems", "maxProperties", "maxContains")


class SchemaError(ValueError):
    """A schema that is invalid, has no instances, or is beyond what is emulated."""


class SchemaMerger:
    """Flattens parts of one schema.

    Args:
        root: what references start at.
    """

    def __init__(self, root: Schema) -> None:
        self._root = root

    def flat(self, schema: Any, rng: random.Random, *, small: bool) -> Schema:
        """The schema with its references and combinations merged in.

        Args:
            schema: a schema, or a boolean.
            rng: chooses branches.
            small: choose branches that end soon, because the value is nested deeply.
        """
        merged: Schema = {}
        todo = [schema]
        for _ in range(_MAX_MERGES):
            if not todo:
                return merged
            part = todo.pop()
            if part is True:
                continue
            if not isinstance(part, Mapping):
                raise SchemaError("a part of it allows no value")
            rest = dict(part)
            if "$ref" in rest:
                todo.append(self._target(rest.pop("$ref")))
            todo.extend(rest.pop("allOf", ()))
            choices = [rest.pop(name) for name in ("anyOf", "oneOf") if rest.get(name)]
            todo.extend(_branch(branches, rng, small=small) for branches in choices)
            if "if" in rest:
                condition, then, other = (rest.pop(name, True) for name in ("if", "then", "else"))
                todo.extend((condition, then) if rng.random() < 0.5 else (other,))
            _merge(merged, rest)
        raise SchemaError("its references form a circle")

    def _target(self, reference: Any) -> Any:
        if not isinstance(reference, str) or not (reference == "#" or reference.startswith("#/")):
            raise SchemaError(f"reference {reference!r} is not a path within the schema")
        found: Any = self._root
        for step in reference[2:].split("/") if len(reference) > 1 else ():
            key = step.replace("~1", "/").replace("~0", "~")
            try:
                found = found[int(key)] if isinstance(found, list) else found[key]
            except (KeyError, IndexError, ValueError, TypeError) as error:
                raise SchemaError(f"reference {reference!r} leads nowhere") from error
        return found


def _branch(branches: list[Any], rng: random.Random, *, small: bool) -> Any:
    allowed = [branch for branch in branches if branch is not False]
    if not allowed:
        raise SchemaError("a part of it allows no value")
    if small:
        least = min(map(_size, allowed))
        allowed = [branch for branch in allowed if _size(branch) == least]
    elif len(allowed) > 1 and rng.random() < 0.8:
        # A value is likelier than null where both may stand.
        allowed = [branch for branch in allowed if branch != {"type": "null"}] or allowed
    return rng.choice(allowed)


def _size(branch: Any) -> int:
    """How large the values of a branch may become: scalars, structures, references that may recur."""
    if "$ref" in str(branch):
        return 2
    kind = branch.get("type") if isinstance(branch, Mapping) else None
    return 1 if kind in {"object", "array"} else 0


def _merge(merged: Schema, part: Schema) -> None:
    for name, value in part.items():
        merged[name] = _MERGES.get(name, _keep_last)(merged[name], value) if name in merged else value
    if merged.get("enum") == [] or merged.get("type") == []:
        raise SchemaError("parts of it contradict each other")


def _keep_last(_old: Any, new: Any) -> Any:
    return new


def _both_types(old: Any, new: Any) -> Any:
    first = [old] if isinstance(old, str) else list(old)
    second = {new} if isinstance(new, str) else set(new)
    if "number" in second:
        second.add("integer")
    if "number" in first and "integer" in second and "number" not in second:
        first = ["integer" if kind == "number" else kind for kind in first]
    return [kind for kind in first if kind in second]


def _both_properties(old: Any, new: Any) -> Any:
    both = dict(old)
    for name, schema in new.items():
        both[name] = {"allOf": [both[name], schema]} if name in both else schema
    return both


def _both_schemas(old: Any, new: Any) -> Any:
    return {"allOf": [old, new]}


_MERGES: dict[str, Callable[[Any, Any], Any]] = {
    "type": _both_types,
    "properties": _both_properties,
    "patternProperties": _both_properties,
    "items": _both_schemas,
    "additionalProperties": _both_schemas,
    "required": lambda old, new: list(dict.fromkeys([*old, *new])),
    "enum": lambda old, new: [value for value in old if value in new],
    **dict.fromkeys(_LARGEST, max),
    **dict.fromkeys(_LEAST, min),
}
