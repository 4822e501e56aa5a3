"""Source texts: public corpora where they are at hand, Python's own library, and what no corpus holds."""

import argparse
import base64
import gzip
import hashlib
import inspect
import json
import os
import random
import shutil
import statistics
import textwrap
import uuid
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from experiments.common.provenance import TraceSource

CORPORA_VARIABLE = "EWSJF_CORPORA"
"""Environment variable with the folder of the corpora."""

_ROOT = Path(__file__).resolve().parents[2]
_FOLDERS = (_ROOT / ".cache" / "corpora", _ROOT.parent / "shared" / "corpora")
_DOCS = ("docs_en", "docs_zh", "docs_ja")
_FILES = {
    **{name: f"fastapi_docs_{name[-2:]}.md" for name in _DOCS},
    "sonnet": "sonnet.txt",
    "humaneval": "HumanEval.jsonl.gz",
    "gsm8k": "gsm8k_test.jsonl.gz",
    "mt_bench": "mt_bench_question.jsonl",
}
# Of what is made: numbers, encoded bytes, JSON of identifiers.
_MADE_SEED = 7


def corpora() -> Path | None:
    """The folder that has all files; None when there is none."""
    given = os.environ.get(CORPORA_VARIABLE)
    folders = (Path(given),) if given else _FOLDERS
    return next((one for one in folders if all((one / name).exists() for name in _FILES.values())), None)


def text_sources(folder: Path) -> tuple[TraceSource, ...]:
    """The files, each with its checksum."""
    return tuple(
        TraceSource(name=name, sha256=hashlib.sha256((folder / name).read_bytes()).hexdigest())
        for name in _FILES.values()
    )


def read_texts(folder: Path) -> dict[str, str]:
    """Texts by source."""
    files = {name: folder / path for name, path in _FILES.items()}
    texts = {name: files[name].read_bytes().decode(errors="ignore") for name in (*_DOCS, "sonnet")}
    texts["humaneval"] = "\n".join(
        row["prompt"] + row["canonical_solution"] for row in _json_lines(files["humaneval"])
    )
    texts["gsm8k"] = "\n".join(f"{row['question']}\n{row['answer']}" for row in _json_lines(files["gsm8k"]))
    texts["mt_bench"] = "\n".join("\n".join(row["turns"]) for row in _json_lines(files["mt_bench"]))
    texts["stdlib"] = "".join(map(inspect.getsource, (argparse, random, statistics)))
    return texts | made_texts()


def made_texts() -> dict[str, str]:
    """What no corpus holds, from a fixed seed."""
    rng = random.Random(_MADE_SEED)  # noqa: S311 - nothing here is a secret
    rows = [{"id": str(uuid.UUID(int=rng.getrandbits(128))), "value": rng.random()} for _ in range(1200)]
    return {
        "floats": json.dumps([[round(rng.gauss(0, 3), 4) for _ in range(8)] for _ in range(1500)]),
        "base64": base64.b64encode(rng.randbytes(70_000)).decode(),
        "hex": rng.randbytes(40_000).hex(),
        "uuid_json": json.dumps(rows),
    }


def tool_definitions() -> list[Mapping[str, Any]]:
    """Functions of the standard library as OpenAI tool definitions: real names, real descriptions."""
    return [
        {"type": "function", "function": tool}
        for module in (statistics, shutil, textwrap, random)
        for tool in _tools_of(module)
    ]


def _tools_of(module: Any) -> Iterator[dict[str, Any]]:
    for name, function in inspect.getmembers(module, inspect.isfunction):
        described = (inspect.getdoc(function) or "").split("\n\n")[0]
        if name.startswith("_") or not described:
            continue
        names = list(inspect.signature(function).parameters)
        properties = {one: {"type": "string", "description": f"{one} of {name}"} for one in names}
        parameters = {"type": "object", "properties": properties, "required": names[:1]}
        yield {"name": name, "description": described, "parameters": parameters}


def _json_lines(file: Path) -> list[dict[str, Any]]:
    raw = file.read_bytes()
    lines = gzip.decompress(raw) if file.suffix == ".gz" else raw
    return [json.loads(line) for line in lines.splitlines()]
