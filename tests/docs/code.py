"""Python, YAML, JSON and PromQL blocks in documents, checked without running them."""

import ast
import json
import re
from typing import Any

import yaml

from tests.docs.fragments import check_application, check_fragment
from tests.docs.marks import BlockError, Mark
from tests.docs.names import check_metrics, check_module


def check_python(text: str) -> None:
    """Compile it, and check that its imports from this project exist.

    Raises:
        BlockError: it does not compile, or imports a name that does not exist.
    """
    try:
        tree = ast.parse(text)
    except SyntaxError as exc:
        raise BlockError(f"line {exc.lineno} of the block: {exc.msg}") from exc
    for node in ast.walk(tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            package = f"{node.module}." if isinstance(node, ast.ImportFrom) else ""
            for alias in node.names:
                check_module(package + alias.name)


def check_yaml(text: str, mark: Mark) -> None:
    """Parse settings with the application's own classes; other YAML needs a mark or a rule.

    Raises:
        BlockError: it is not YAML, is rejected, or has no known kind.
    """
    try:
        contents = list(yaml.safe_load_all(text))
    except yaml.YAMLError as exc:
        raise BlockError(f"no YAML: {exc}") from exc
    if mark.is_not_run:
        return
    for content in contents:
        if mark.word == "settings":
            check_fragment(content, mark.detail)
        else:
            _check_document(content)


def _check_document(content: Any) -> None:
    match content:
        case {"applications": _}:
            check_application(content)
        case {"args": arguments, **rest} if not rest:
            check_fragment(arguments, "args")
        case {"groups": _} | {"scrape_configs": _}:
            check_metrics(json.dumps(content))
        case _:
            raise BlockError(
                "nothing says what this YAML is: write `<!-- test: settings under PATH -->` before it, "
                "with args or a place such as models[0].scheduler, or `<!-- test: parse, REASON -->`"
            )


def check_json(text: str) -> None:
    """Parse it.

    Raises:
        BlockError: it is not JSON.
    """
    try:
        json.loads(text)
    except ValueError as exc:
        raise BlockError(f"no JSON: {exc}") from exc


def check_promql(text: str) -> None:
    """Check that its brackets close and its metrics exist.

    Raises:
        BlockError: they do not.
    """
    open_brackets: list[str] = []
    for sign in re.sub(r'"[^"]*"|#.*', "", text):
        if sign in "([{":
            open_brackets.append({"(": ")", "[": "]", "{": "}"}[sign])
        elif sign in ")]}" and (not open_brackets or open_brackets.pop() != sign):
            raise BlockError(f"a {sign} too many in PromQL")
    if open_brackets:
        raise BlockError(f"a {open_brackets[-1]} is missing in PromQL")
    check_metrics(text)
