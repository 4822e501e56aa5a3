"""Agent programs: conversations of many turns with sub-agents, whose prompts repeat each other.

A program is a closed loop: a turn starts when the turns in `after` have ended and its gap has passed, so its
arrival depends on how fast it was served. Prompts are lists of block ids as in `TraceRequest.prefix`, with
smaller blocks. A turn stores its ids as a reference: the first `known` blocks of an earlier turn, and `new`
blocks that no earlier prompt of the program has.

The file has one JSON object per line; the turns of a program are in the order of their `row`, from 0:

    program                         name of the program
    session                         conversation
    after                           rows that must have ended
    gap_net_s                       seconds between their end and the start; null at the start
    prompt_tokens, output_tokens    length of the whole prompt, and of the answer
    blocks                          [source row, known, new], in blocks of 64 tokens
    stop                            how the answer ends: `tool_use`, `end_turn` or unknown

Other fields are ignored.

`generate_programs` draws programs for users without a file. Its figures are percentiles of 292 recorded
coding sessions (callanjfox/kv-cache-tester).
"""

import gzip
import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from serve_app.lab.workloads import plain_stream, stream
from serve_app.request import TurnEnd

BLOCK_TOKENS = 64
"""Tokens per block id."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """One request of a program.

    Attributes:
        session: number of its conversation within the program; 0 is the root.
        after: indices of the turns that must have ended.
        gap_s: seconds from their end to its start.
        source: index of the turn with whose blocks its prompt starts.
        known: number of these blocks.
        new: number of further full blocks.
        ending: how its answer ends; None if that is not recorded.
    """

    session: int
    after: tuple[int, ...]
    gap_s: float
    prompt_tokens: int
    output_tokens: int
    source: int
    known: int
    new: int
    ending: TurnEnd | None = None


@dataclass(frozen=True, slots=True)
class Program:
    """A program; its first turn is the first of the root conversation."""

    name: str
    turns: tuple[Turn, ...]

    @property
    def max_tokens(self) -> int:
        """The longest prompt with its answer."""
        return max(turn.prompt_tokens + turn.output_tokens for turn in self.turns)

    def parent(self, session: int) -> int | None:
        """Return the conversation that launched a sub-agent, or None for the root."""
        first = next(turn for turn in self.turns if turn.session == session)
        return self.turns[first.after[0]].session if session and first.after else None

    def block_ids(self, number: int) -> list[tuple[int, ...]]:
        """Return the block ids of each turn: those of its prompt, and those that its answer adds to it.

        The next prompt of a conversation usually contains the answer. The ids of its blocks up to the end of
        that answer are known in advance, so an engine that keeps generated tokens has them cached.

        Args:
            number: number of the program in a run; ids of different programs differ.
        """
        ids: list[tuple[int, ...]] = []
        unused = number << 32
        for turn in self.turns:
            known = ids[turn.source][: turn.known] if turn.known else ()
            ids.append(known + tuple(range(unused, unused + turn.new)))
            unused += turn.new
        with_answers = list(ids)
        for turn, blocks in zip(self.turns, ids, strict=True):
            if turn.known and turn.known == len(ids[turn.source]) == len(with_answers[turn.source]):
                source = self.turns[turn.source]
                end = (source.prompt_tokens + source.output_tokens) // BLOCK_TOKENS
                with_answers[turn.source] = blocks[:end]
        return with_answers

    def ideal_prefills(self) -> list[int]:
        """Return the prompt tokens that each turn computes if nothing of the program is ever evicted."""
        computed: set[int] = set()
        left = []
        for turn, ids in zip(self.turns, self.block_ids(0), strict=True):
            prompt = ids[: (turn.prompt_tokens - 1) // BLOCK_TOKENS]
            hits = next((place for place, one in enumerate(prompt) if one not in computed), len(prompt))
            left.append(turn.prompt_tokens - BLOCK_TOKENS * hits)
            computed.update(ids)
        return left


def within(programs: Sequence[Program], max_tokens: int) -> list[Program]:
    """Return the programs whose requests have at most so many tokens, prompt and answer."""
    return [one for one in programs if one.max_tokens <= max_tokens]


def shuffled(programs: Sequence[Program], seed: int, count: int | None = None) -> list[Program]:
    """Return the programs in an order drawn by seed: `count` of them, repeated if there are fewer."""
    order = list(programs)
    plain_stream(seed, "order of programs").shuffle(order)
    return order if count is None else [order[place % len(order)] for place in range(count)]


def with_gaps_up_to(programs: Sequence[Program], seconds: float) -> list[Program]:
    """Return the same programs with longer gaps cut."""
    return [
        replace(one, turns=tuple(replace(turn, gap_s=min(turn.gap_s, seconds)) for turn in one.turns))
        for one in programs
    ]


# The file

_ENDINGS = {"tool_use": TurnEnd.TOOLS, "end_turn": TurnEnd.DONE}


def load_programs(path: Path) -> list[Program]:
    """Read a compressed file of programs."""
    programs: dict[str, list[Turn]] = {}
    sessions: dict[str, dict[str, int]] = {}
    with gzip.open(path, "rt", encoding="utf-8") as lines:
        for row in map(json.loads, lines):
            name = row["program"]
            numbers = sessions.setdefault(name, {})
            source, known, new = row["blocks"]
            turn = Turn(
                session=numbers.setdefault(row["session"], len(numbers)),
                after=tuple(row["after"]),
                gap_s=row["gap_net_s"] or 0.0,
                prompt_tokens=row["prompt_tokens"],
                output_tokens=max(1, row["output_tokens"]),
                source=source,
                known=known,
                new=new,
                ending=_ENDINGS.get(row["stop"]),
            )
            programs.setdefault(name, []).append(turn)
    return [Program(name, tuple(turns)) for name, turns in programs.items()]


# Generated programs

# Percentiles 0, 10, 50, 90, 99 and 100. Tokens are interpolated on a logarithmic scale, gaps linearly.
_SHARES = (0.0, 0.1, 0.5, 0.9, 0.99, 1.0)
_TURNS = (1, 6, 50, 188, 342, 500)
_AGENT_TURNS = (2, 5, 11, 18, 24, 30)
_FIRST_PROMPT = (9_000, 16_127, 23_305, 90_000, 180_000, 200_000)
_ADDED = (64, 227, 707, 4_223, 25_000, 60_000)
_OUTPUT = (20, 101, 213, 916, 3_896, 8_000)
_GAP_AFTER_TOOLS = (0.0, 0.0, 1.1, 60.0, 606.0, 3_600.0)
_GAP_AFTER_DONE = (0.0, 0.5, 174.0, 2_603.0, 38_077.0, 60_000.0)
_AGENT_FIRST_PROMPT = 10_000
# Share of turns that end without tools, that drop most of their prompt, and that launch sub-agents.
_DONE, _COMPACTION, _LAUNCH = 0.06, 0.02, 0.002
# Tools and system prompt, which a compaction keeps, and the prompt beyond which it always happens.
_SYSTEM_BLOCKS, _MOST_BLOCKS = 265, 2_500


def generate_programs(count: int, seed: int) -> list[Program]:
    """Draw programs by the figures of recorded coding sessions."""
    rng = stream(seed, "programs")
    return [Program(f"g{number:03d}", _Drawing(rng).turns()) for number in range(count)]


class _Drawing:
    """A program in the course of being drawn."""

    def __init__(self, rng: np.random.Generator) -> None:
        self._rng = rng
        self._turns: list[Turn] = []
        self._sessions = 1

    def turns(self) -> tuple[Turn, ...]:
        last = self._add(0, (), self._whole(_FIRST_PROMPT))
        for _ in range(self._whole(_TURNS) - 1):
            agents = []
            if self._rng.random() < _LAUNCH:
                agents = [self._agent(last) for _ in range(int(self._rng.integers(1, 4)))]
            last = self._add(0, (last, *agents))
        return tuple(self._turns)

    def _agent(self, launcher: int) -> int:
        """Add the turns of a sub-agent. Return the last one."""
        session, self._sessions = self._sessions, self._sessions + 1
        last = self._add(session, (launcher,), _AGENT_FIRST_PROMPT)
        for _ in range(self._whole(_AGENT_TURNS) - 1):
            last = self._add(session, (last,))
        return last

    def _add(self, session: int, after: tuple[int, ...], first_prompt: int | None = None) -> int:
        """Add a turn that follows the first of `after` in its conversation, or starts one."""
        rng, known, gap_s = self._rng, 0, 0.0
        if first_prompt is None:
            before = self._turns[after[0]]
            known = before.prompt_tokens // BLOCK_TOKENS
            if known > _MOST_BLOCKS or rng.random() < _COMPACTION:
                known = min(known, _SYSTEM_BLOCKS)
            gaps = _GAP_AFTER_DONE if before.ending is TurnEnd.DONE else _GAP_AFTER_TOOLS
            gap_s = float(np.interp(rng.random(), _SHARES, gaps))
            first_prompt = known * BLOCK_TOKENS + before.output_tokens + self._whole(_ADDED)
        turn = Turn(
            session=session,
            after=after,
            gap_s=gap_s,
            prompt_tokens=first_prompt,
            output_tokens=self._whole(_OUTPUT),
            source=after[0] if known else 0,
            known=known,
            new=first_prompt // BLOCK_TOKENS - known,
            ending=TurnEnd.DONE if rng.random() < _DONE else TurnEnd.TOOLS,
        )
        self._turns.append(turn)
        return len(self._turns) - 1

    def _whole(self, percentiles: Sequence[float]) -> int:
        """Draw a whole number; between two percentiles, its logarithm is uniform."""
        return int(np.exp(np.interp(self._rng.random(), _SHARES, np.log(percentiles))))
