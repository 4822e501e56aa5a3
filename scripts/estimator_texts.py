"""Real texts, real tokenizers, and request bodies made of both, for `bench_estimator.py`.

A body is JSON as a client would send it, and passes the gateway's own parser; its true length is what the
tokenizer makes of the model's chat template. Tokenizers come from where they are at hand: the demo model's
folder, the package mistral-common, and the files of a folder that is named with `--more`:

    qwen.tiktoken                 from the package dashscope
    cl100k_base.tiktoken          from litellm, there under its hash 9b5ad71b; Llama 3's first 100,000 words
    o200k_base.tiktoken           from litellm, fb374d41; gpt-oss
    deepseek_tokenizer.json       from litellm
"""

import argparse
import base64
import gzip
import inspect
import json
import math
import random
import shutil
import statistics
import textwrap
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from serve_app.request import PromptShape
from serve_app.serving.gateway.request.parse import PARSERS

Messages = list[dict[str, Any]]

# What a template says about tools differs from model to model; this is of the usual length.
_TOOL_PREAMBLE = (
    "# Tools\n\nYou can call functions to help with the request. Their signatures stand between the tags "
    "below, one JSON object to a line.\n<tools>\n{tools}\n</tools>\n\nTo call one, answer with its name and "
    'its arguments as JSON: <tool_call>\n{{"name": ..., "arguments": ...}}\n</tool_call>'
)
_IMAGE_TOKENS = 576  # LLaVA 1.5: 24 x 24 patches, whatever the size
_PATTERNS = {
    "qwen": r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+",
    "cl100k_base": r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    "o200k_base": r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+"
    r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+",
}


@dataclass(frozen=True, slots=True)
class Tokenizer:
    """Counts the tokens of a text, and those that a chat template adds.

    Attributes:
        per_chat: tokens that open every chat, its default system prompt included, and open the answer.
        per_message: tokens around each message.
    """

    name: str
    count: Callable[[str], int]
    per_chat: int
    per_message: int


@dataclass(frozen=True, slots=True)
class Sample:
    """One prompt as the gateway sees it, with its true length in tokens."""

    source: str
    kind: str
    shape: PromptShape
    tokens: int


def _smollm(folder: Path) -> Tokenizer:
    from transformers import AutoTokenizer  # noqa: PLC0415 - takes seconds, and the extra may be missing

    tokenizer = AutoTokenizer.from_pretrained(folder)

    def chat(messages: int) -> int:
        roles = ["user" if (messages - index) % 2 else "assistant" for index in range(messages)]
        text = tokenizer.apply_chat_template(
            [{"role": role, "content": "a"} for role in roles], tokenize=False, add_generation_prompt=True
        )
        return len(tokenizer.encode(text, add_special_tokens=False)) - messages

    per_message = (chat(5) - chat(3)) // 2
    return Tokenizer(
        "smollm2 (49k)", lambda text: len(tokenizer.encode(text)), chat(1) - per_message, per_message
    )


def _mistral(file: Path, name: str) -> Tokenizer:
    from mistral_common.tokens.tokenizers.mistral import MistralTokenizer  # noqa: PLC0415 - part of an extra

    inner = MistralTokenizer.from_file(str(file)).instruct_tokenizer.tokenizer
    # <s>; [INST] and [/INST] around a question, </s> after an answer, in some versions two tokens each.
    return Tokenizer(name, lambda text: len(inner.encode(text, bos=False, eos=False)), 2, 2)


def _byte_pairs(file: Path) -> Tokenizer:
    """A `.tiktoken` file, under ChatML."""
    import tiktoken  # noqa: PLC0415 - part of an extra

    lines = (line.split() for line in file.read_bytes().splitlines() if line)
    ranks = {base64.b64decode(token): int(rank) for token, rank in lines}
    encoding = tiktoken.Encoding(
        file.stem, pat_str=_PATTERNS[file.stem], mergeable_ranks=ranks, special_tokens={}
    )
    name = f"{file.stem} ({len(ranks) // 1000}k)"
    return Tokenizer(name, lambda text: len(encoding.encode_ordinary(text)), 3, 5)


def _json_file(file: Path) -> Tokenizer:
    """A `tokenizer.json`, under DeepSeek's template: one mark before each message."""
    from tokenizers import Tokenizer as Fast  # noqa: PLC0415 - part of an extra

    fast = Fast.from_file(str(file))
    name = f"{file.stem.removesuffix('_tokenizer')} ({fast.get_vocab_size() // 1000}k)"
    return Tokenizer(name, lambda text: len(fast.encode(text, add_special_tokens=False).ids), 2, 1)


def tokenizers(folder: Path, more: Path | None) -> Iterator[Tokenizer]:
    """All at hand, one at a time."""
    if folder.is_dir() and find_spec("transformers"):
        yield _smollm(folder)
    spec = find_spec("mistral_common")
    if spec is not None and spec.origin is not None:
        data = Path(spec.origin).parent / "data"
        yield _mistral(data / "tokenizer.model.v1", "mistral v1 (32k)")
        yield _mistral(data / "tekken_240911.json", "tekken (131k)")
    if more is not None:
        yield from map(_byte_pairs, sorted(more.glob("*.tiktoken")))
        yield from map(_json_file, sorted(more.glob("*_tokenizer.json")))


def seeded(seed: int) -> random.Random:
    """A reproducible source of chance."""
    return random.Random(seed)  # noqa: S311 - nothing here is a secret


def read_texts(corpora: Path) -> dict[str, str]:
    """Texts by source; those that no corpus holds (numbers, encoded bytes) are made, from a fixed seed."""
    texts = {
        name: (corpora / f"fastapi_docs_{name[-2:]}.md").read_bytes().decode(errors="ignore")
        for name in ("docs_en", "docs_zh", "docs_ja")
    }
    texts["sonnet"] = (corpora / "sonnet.txt").read_text()
    human_eval = _json_lines(gzip.decompress((corpora / "HumanEval.jsonl.gz").read_bytes()))
    texts["humaneval"] = "\n".join(row["prompt"] + row["canonical_solution"] for row in human_eval)
    texts["stdlib"] = "".join(map(inspect.getsource, (argparse, random, statistics)))
    gsm8k = _json_lines(gzip.decompress((corpora / "gsm8k_test.jsonl.gz").read_bytes()))
    texts["gsm8k"] = "\n".join(f"{row['question']}\n{row['answer']}" for row in gsm8k)
    mt_bench = _json_lines((corpora / "mt_bench_question.jsonl").read_bytes())
    texts["mt_bench"] = "\n".join("\n".join(row["turns"]) for row in mt_bench)
    return texts | _made_texts(seeded(7))


def _json_lines(raw: bytes) -> list[dict[str, Any]]:
    return [json.loads(line) for line in raw.splitlines()]


def _made_texts(rng: random.Random) -> dict[str, str]:
    rows = [{"id": str(uuid.UUID(int=rng.getrandbits(128))), "value": rng.random()} for _ in range(1200)]
    return {
        "floats": json.dumps([[round(rng.gauss(0, 3), 4) for _ in range(8)] for _ in range(1500)]),
        "base64": base64.b64encode(rng.randbytes(70_000)).decode(),
        "hex": rng.randbytes(40_000).hex(),
        "uuid_json": json.dumps(rows),
    }


def tool_definitions() -> list[dict[str, Any]]:
    """Functions of the standard library as OpenAI tool definitions: real names, real descriptions."""
    tools = []
    for module in (statistics, shutil, textwrap, random):
        for name, function in inspect.getmembers(module, inspect.isfunction):
            described = (inspect.getdoc(function) or "").split("\n\n")[0]
            if name.startswith("_") or not described:
                continue
            names = list(inspect.signature(function).parameters)
            properties = {one: {"type": "string", "description": f"{one} of {name}"} for one in names}
            parameters = {"type": "object", "properties": properties, "required": names[:1]}
            function_json = {"name": name, "description": described, "parameters": parameters}
            tools.append({"type": "function", "function": function_json})
    return tools


class Bodies:
    """Draws request bodies of all kinds and sizes, with pieces of the first or the second half of each text.

    Args:
        longest_bytes: of the text in one body; sizes are log-uniform from 100 bytes.
    """

    def __init__(
        self, texts: dict[str, str], tokenizer: Tokenizer, rng: random.Random, longest_bytes: int
    ) -> None:
        self._texts, self._tokenizer, self._rng = texts, tokenizer, rng
        self._longest_bytes = longest_bytes
        self._tools = tool_definitions()

    def draw(self, *, half: int) -> list[Sample]:
        """One body of the first half (0) or the second (1); several, in order, where a chat goes on."""
        rng = self._rng
        source = rng.choice([*self._texts, "two"])
        size = int(math.exp(rng.uniform(math.log(100), math.log(self._longest_bytes))))
        kind = rng.choice(("completion", "completion", "chat", "chat", "turns", "tools"))
        if kind == "completion":
            text = self._text(source, size, half)
            shape = PARSERS["/v1/completions"].parse(_body(prompt=text)).shape
            return [Sample(source, kind, shape, self._tokenizer.count(text) + 1)]
        if kind == "turns":
            return self._conversation(source, size, half)
        system = [{"role": "system", "content": "You are a careful assistant. Answer in one paragraph."}]
        messages = system * (rng.random() < 0.5) + [
            {"role": "user", "content": self._text(source, size, half)}
        ]
        tools = rng.sample(self._tools, rng.randint(1, 12)) if kind == "tools" else []
        return [self._chat(source, kind, messages, tools)]

    def with_image(self, *, half: int, image_bytes: int) -> Sample:
        """A chat about an image: its address, or, with a number of bytes, a data URI that holds it."""
        encoded = base64.b64encode(self._rng.randbytes(image_bytes)).decode()
        url = f"data:image/png;base64,{encoded}" if image_bytes else "https://example.org/cat.png"
        text = self._text("mt_bench", 200, half)
        content = [{"type": "text", "text": text}, {"type": "image_url", "image_url": {"url": url}}]
        parsed = PARSERS["/v1/chat/completions"].parse(_body(messages=[{"role": "user", "content": content}]))
        tokenizer = self._tokenizer
        tokens = tokenizer.count(text) + tokenizer.per_chat + tokenizer.per_message + _IMAGE_TOKENS
        return Sample("mt_bench", "data URI" if image_bytes else "image URL", parsed.shape, tokens)

    def _conversation(self, source: str, size: int, half: int) -> list[Sample]:
        """Every request repeats what was said before, as chat clients do."""
        turns = self._rng.randint(2, 6)
        messages: Messages = []
        samples = []
        for _ in range(turns):
            messages.append({"role": "user", "content": self._text(source, size // (3 * turns) + 1, half)})
            samples.append(self._chat(source, "turns", messages, []))
            answer = self._text(source, 2 * size // (3 * turns) + 1, half)
            messages.append({"role": "assistant", "content": answer})
        return samples

    def _chat(self, source: str, kind: str, messages: Messages, tools: list[dict[str, Any]]) -> Sample:
        body = _body(messages=messages, **({"tools": tools} if tools else {}))
        shape = PARSERS["/v1/chat/completions"].parse(body).shape
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
        while len(text) < 2 * characters:  # a short text goes round
            text += text
        start = self._rng.randrange(len(text) - characters)
        return text[start : start + characters]


def _body(**fields: Any) -> bytes:
    """As OpenAI's client writes it: UTF-8, no blanks."""
    return json.dumps(
        {"model": "m", "max_tokens": 256, **fields}, ensure_ascii=False, separators=(",", ":")
    ).encode()
