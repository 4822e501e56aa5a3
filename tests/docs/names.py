"""Names in documents that must exist: metrics, settings, files, modules."""

import pkgutil
import re
from functools import cache

from docs_reference.metrics import metric_names
from docs_reference.settings_tree import blocks
from serve_app.serving.gateway.tracing import request_trace as span_names
from tests.docs.documents import ROOT
from tests.docs.marks import BlockError

_METRIC = re.compile(r"\bewsjf_[a-z0-9_]*[a-z0-9](?![a-z0-9_*])")
_SAMPLE = re.compile(r"_(bucket|sum|count)$")
_SETTING = re.compile(r"[a-z_0-9]+(?:\[[0-9]*\])?(?:\.[a-z_0-9]+(?:\[[0-9]*\])?)+\Z")
_FILE = re.compile(r"[\w.<>*-]+(?:/[\w.<>*-]+)+/?\Z")
_MODULE = re.compile(r"(?:serve_app|experiments)(?:\.[A-Za-z_]\w*)*(?::\w+)?\Z")
_SUFFIXES = (".py", ".md", ".yaml", ".toml", ".json", ".jsonl", ".txt", ".sh", ".csv", ".env", ".log")
# Created by programs, so they need not exist.
_MADE = ("build/", "out/", "models/", ".venv/", ".cache/")


def check_metrics(text: str) -> None:
    """Check that every metric of ours in a text is exported.

    Raises:
        BlockError: one is not.
    """
    known = _known_metrics()
    for name in _METRIC.findall(text):
        if name not in known and _SAMPLE.sub("", name) not in known:
            raise BlockError(f"there is no metric {name}")


@cache
def _known_metrics() -> frozenset[str]:
    return metric_names()


def check_setting(text: str) -> None:
    """Check that a dotted path that begins like a setting leads to a setting or block.

    Raises:
        BlockError: it begins with the name of a block, and leads nowhere.
    """
    if not _SETTING.match(text) or text.endswith(_SUFFIXES):
        return
    if text in _span_words():
        return
    path = re.sub(r"\[\d*\]", "", text).removeprefix("args.")
    if path.partition(".")[0] in block_names() and not any(
        known == path or known.endswith(f".{path}") for known in _setting_paths()
    ):
        raise BlockError(f"there is no setting {text}")


@cache
def _span_words() -> frozenset[str]:
    """Return the names of spans and of their attributes."""
    return frozenset(str(word) for name, word in vars(span_names).items() if name.isupper())


@cache
def _setting_paths() -> frozenset[str]:
    """Return every setting and block, without the brackets of lists."""
    found = {setting.path for block in blocks() for setting in block.settings}
    return frozenset(path.replace("[]", "") for path in found)


@cache
def block_names() -> frozenset[str]:
    return frozenset(block.path.replace("[]", "").rpartition(".")[2] for block in blocks() if block.path)


def check_file(text: str) -> None:
    """Check that a path of the repository exists.

    Raises:
        BlockError: its first folder is in the repository, but it does not exist.
    """
    name = text.partition(":")[0].partition("#")[0]
    if not _FILE.match(name) or name.startswith(_MADE) or not (ROOT / name.partition("/")[0]).is_dir():
        return
    pattern = re.sub(r"<\w+>", "*", name).rstrip("/")
    if not any(ROOT.glob(pattern)):
        raise BlockError(f"{name} does not exist")


def check_module(text: str) -> None:
    """Check that a dotted name of ours is a module, or a name in one.

    Raises:
        BlockError: it is not.
    """
    if _MODULE.match(text):
        try:
            pkgutil.resolve_name(text)
        except (ImportError, AttributeError) as exc:
            raise BlockError(f"{text} does not exist") from exc
