"""Workloads of sessions: turns that share instructions, and whose think time is kept.

*Code generation* and *reasoning* are like the workloads of these names in the catalogue of inference-perf,
*b2b-saas* has the sizes of llm-d's published runs with shared prefixes: 150 customers of five users.

Conversations are multi-turn chats, in which every prompt repeats the conversation so far after shared
instructions.

A session belongs to an application, whose instructions begin each of its prompts. Each turn adds a message
and, for later turns, the answer. So some engine has computed most of a prompt before, which prefix affinity
exploits.

Mean turns near 3.5, and messages and answers of some hundred tokens, follow ShareGPT, LMSYS-Chat-1M and
WildChat (2 to 7 turns). These are assumptions: a tenth of the messages contain a document; a dozen
applications have instructions of 500 to 3,000 tokens and are chosen by Zipf's law; turns are half a minute
apart. A turn does not wait for the previous answer, because a trace has one clock for all systems.
"""

import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np

from serve_app.lab.workloads import (
    PREFIX_BLOCK_TOKENS,
    GammaArrivals,
    Lengths,
    LognormalLengths,
    MixedLengths,
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

_MESSAGES = MixedLengths(
    (
        (0.9, LognormalLengths(mean=120, cv=1.2, max_tokens=1_500)),
        (0.1, LognormalLengths(mean=2_000, cv=0.6, max_tokens=6_000)),
    )
)
_ANSWERS = LognormalLengths(mean=220, cv=0.8, max_tokens=1_000)


@dataclass(frozen=True, slots=True, kw_only=True)
class ConversationSettings:
    """Settings of the conversations.

    Attributes:
        mean_turns: geometric; a session ends earlier when `max_context_tokens` is full.
        pause_s: mean time from one turn of a session to the next, exponential.
        applications: sets of instructions, each shared by all sessions of its application.
        zipf: skew of sessions over applications.
        instruction_tokens: shortest and longest instructions.
    """

    mean_turns: float = 3.5
    pause_s: float = 30.0
    applications: int = 12
    zipf: float = 1.0
    instruction_tokens: tuple[int, int] = (500, 3_000)
    max_context_tokens: int = 12_000


def conversations(count: int, rate_per_s: float, seed: int, settings: ConversationSettings) -> Trace:
    """Return `count` requests of sessions with random starts, at nearly `rate_per_s` turns per second.

    No session is active at the start, so the first minutes have few and short histories.
    """
    made = _Conversations(settings, seed)
    starts = GammaArrivals(rate_per_s=rate_per_s / settings.mean_turns)
    requests = [
        request
        for start in starts.sample(count, stream(seed, "conversation starts"))
        for request in made.session(float(start))
    ]
    requests.sort(key=lambda request: request.arrival_s)
    return Trace(
        name="multi-turn",
        source=f"generated conversations at {rate_per_s:.4g} turns/s, seed {seed}, {settings}",
        requests=tuple(requests[:count]),
    )


class _Conversations:
    """Draws sessions, and assigns IDs to their blocks."""

    def __init__(self, settings: ConversationSettings, seed: int) -> None:
        self._settings = settings
        self._rng = stream(seed, "conversations")
        low, high = settings.instruction_tokens
        lengths = self._rng.integers(low, high, settings.applications, endpoint=True)
        self._ids = itertools.count()
        # Whole blocks of the instructions; the block in which they end differs between sessions.
        self._instructions = [
            (int(tokens), [next(self._ids) for _ in range(int(tokens) // PREFIX_BLOCK_TOKENS)])
            for tokens in lengths
        ]
        shares = 1 / np.arange(1, settings.applications + 1) ** settings.zipf
        self._shares = shares / shares.sum()

    def session(self, start_s: float) -> Iterator[TraceRequest]:
        """Yield the turns of one session."""
        rng, settings = self._rng, self._settings
        turns = int(rng.geometric(1 / settings.mean_turns))
        messages, answers = _MESSAGES.sample(turns, rng), _ANSWERS.sample(turns, rng)
        pauses_s = rng.exponential(settings.pause_s, turns)
        tokens, instructions = self._instructions[int(rng.choice(settings.applications, p=self._shares))]
        ids, at = list(instructions), start_s
        for message, answer, pause_s in zip(messages, answers, pauses_s, strict=True):
            tokens += int(message)
            if tokens + int(answer) > settings.max_context_tokens:
                return
            ids += [next(self._ids) for _ in range(tokens // PREFIX_BLOCK_TOKENS - len(ids))]
            yield TraceRequest(
                arrival_s=at, prompt_tokens=tokens, output_tokens=int(answer), prefix=tuple(ids)
            )
            tokens += int(answer)
            at += float(pause_s)
