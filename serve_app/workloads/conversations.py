"""Multi-turn chats, in which every prompt repeats the conversation so far after shared instructions.

A session belongs to an application, whose instructions begin each of its prompts. Each turn adds a message
and, for later turns, the answer. So some engine has computed most of a prompt before, which is what prefix
affinity uses.

Mean turns near 3.5, and messages and answers of some hundred tokens, follow ShareGPT, LMSYS-Chat-1M and
WildChat (2 to 7 turns). These are assumptions: a tenth of the messages bring a document; a dozen applications
with instructions of 500 to 3,000 tokens, chosen by Zipf's law; half a minute between two turns. A turn does
not wait for the answer before it, since a trace has one clock, whatever serves it.
"""

import itertools
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from serve_app.workloads.arrivals import GammaArrivals
from serve_app.workloads.lengths import LognormalLengths, MixedLengths
from serve_app.workloads.streams import stream
from serve_app.workloads.trace import PREFIX_BLOCK_TOKENS, Trace, TraceRequest

_MESSAGES = MixedLengths(
    (
        (0.9, LognormalLengths(mean=120, cv=1.2, max_tokens=1_500)),
        (0.1, LognormalLengths(mean=2_000, cv=0.6, max_tokens=6_000)),
    )
)
_ANSWERS = LognormalLengths(mean=220, cv=0.8, max_tokens=1_000)


@dataclass(frozen=True, slots=True, kw_only=True)
class ConversationSettings:
    """What conversations look like.

    Attributes:
        mean_turns: geometric; a session ends earlier when `max_context_tokens` is full.
        pause_s: mean time from one turn of a session to the next, exponential.
        applications: sets of instructions, each shared by all sessions of its application.
        zipf: how unequally sessions are spread over applications.
        instruction_tokens: shortest and longest instructions.
    """

    mean_turns: float = 3.5
    pause_s: float = 30.0
    applications: int = 12
    zipf: float = 1.0
    instruction_tokens: tuple[int, int] = (500, 3_000)
    max_context_tokens: int = 12_000

    def __post_init__(self) -> None:
        low, high = self.instruction_tokens
        if not (self.mean_turns >= 1 and self.pause_s > 0 and self.applications >= 1 and 0 < low <= high):
            raise ValueError(f"conversations need turns, pauses, applications and instructions, got {self}")
        if self.max_context_tokens <= high:
            raise ValueError(f"max_context_tokens must exceed the longest instructions, got {self}")


def conversations(count: int, rate_per_s: float, seed: int, settings: ConversationSettings) -> Trace:
    """The first `count` requests of sessions that begin at random, nearly `rate_per_s` turns a second.

    No session is under way at the start, so the first minutes have few and short histories.
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
    """Draws sessions, and assigns ids to their blocks."""

    def __init__(self, settings: ConversationSettings, seed: int) -> None:
        self._settings = settings
        self._rng = stream(seed, "conversations")
        low, high = settings.instruction_tokens
        lengths = self._rng.integers(low, high, settings.applications, endpoint=True)
        self._ids = itertools.count()
        # Whole blocks of the instructions; the block in which they end differs from session to session.
        self._instructions = [
            (int(tokens), [next(self._ids) for _ in range(int(tokens) // PREFIX_BLOCK_TOKENS)])
            for tokens in lengths
        ]
        shares = 1 / np.arange(1, settings.applications + 1) ** settings.zipf
        self._shares = shares / shares.sum()

    def session(self, start_s: float) -> Iterator[TraceRequest]:
        """The turns of one session."""
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
