"""Workloads of sessions: turns that share instructions, and whose think time is kept.

*Code generation* and *reasoning* are like the workloads of these names in the catalogue of inference-perf,
*b2b-saas* has the sizes of llm-d's published runs with shared prefixes: 150 customers of five users.
"""

import itertools
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from serve_app.lab.workloads import (
    PREFIX_BLOCK_TOKENS,
    GammaArrivals,
    Lengths,
    LognormalLengths,
    Tokens,
    Trace,
    TraceRequest,
    UniformLengths,
    stream,
)


@dataclass(frozen=True, slots=True)
class ExponentialLengths:
    """Lengths from `shortest` to `longest`, exponential above the shortest.

    Attributes:
        mean: before the cut.
    """

    shortest: int
    mean: float
    longest: int

    def sample(self, count: int, rng: np.random.Generator) -> Tokens:
        """Draw whole numbers."""
        drawn = self.shortest + rng.exponential(self.mean - self.shortest, count)
        return np.asarray(np.minimum(drawn, self.longest), dtype=np.int64)


@dataclass(frozen=True, slots=True, kw_only=True)
class Sessions:
    """Sessions that start at random, each with one of several instructions.

    The next turn follows `think_s` after the end of an answer, which is assumed to take `token_s` per token:
    a trace has one clock for all systems.

    Attributes:
        instructions: number of different instructions.
        added: tokens that a turn adds.
        answers: tokens of an answer.
        continues: whether a turn repeats the session so far; otherwise it follows the instructions alone.
    """

    instructions: int
    instruction_tokens: int
    turns: int
    added: Lengths
    answers: Lengths
    continues: bool = True
    think_s: float = 20.0
    token_s: float = 0.02

    def trace(self, count: int, rate_per_s: float, seed: int) -> Trace:
        """Return `count` requests of sessions with random starts, at nearly `rate_per_s` turns per second."""
        rng, ids = stream(seed, "code generation"), itertools.count()
        blocks = self.instruction_tokens // PREFIX_BLOCK_TOKENS
        instructions = [[next(ids) for _ in range(blocks)] for _ in range(self.instructions)]
        starts = GammaArrivals(rate_per_s=rate_per_s / self.turns).sample(count, stream(seed, "code starts"))
        requests: list[TraceRequest] = []
        for start in starts:
            chosen, at = instructions[rng.integers(self.instructions)], float(start)
            prefix, tokens = list(chosen), self.instruction_tokens
            for _ in range(self.turns):
                tokens += int(self.added.sample(1, rng)[0])
                output = int(self.answers.sample(1, rng)[0])
                prefix += [next(ids) for _ in range(tokens // PREFIX_BLOCK_TOKENS - len(prefix))]
                requests.append(
                    TraceRequest(
                        arrival_s=at, prompt_tokens=tokens, output_tokens=output, prefix=tuple(prefix)
                    )
                )
                tokens += output
                at += self.think_s + self.token_s * output
                if not self.continues:
                    prefix, tokens = list(chosen), self.instruction_tokens
        requests.sort(key=lambda request: request.arrival_s)
        source = f"sessions at {rate_per_s:.4g} turns/s, seed {seed}, {self}"
        return Trace(name="sessions", source=source, requests=tuple(requests[:count]))


SESSIONS: Mapping[str, Sessions] = {
    "code generation": Sessions(
        instructions=4,
        instruction_tokens=8_192,
        turns=8,
        added=UniformLengths(300, 2_000),
        answers=UniformLengths(50, 400),
    ),
    "reasoning": Sessions(
        instructions=1,
        instruction_tokens=250,
        turns=1,
        added=LognormalLengths(mean=1_000, cv=0.8, max_tokens=5_000),
        answers=ExponentialLengths(shortest=500, mean=8_000, longest=32_000),
    ),
    "b2b-saas": Sessions(
        instructions=150,
        instruction_tokens=6_000,
        turns=5,
        added=UniformLengths(1_200, 1_200),
        answers=UniformLengths(1_000, 1_000),
        continues=False,
    ),
}
