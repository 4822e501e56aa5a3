"""The decoding sequences of a batch, advanced together at a cost that does not grow with their number.

Each decoding sequence gains one token per step, so nothing is counted per sequence and step. A clock counts
the steps in which they decode. A sequence stores the clock at which it joined and the clock at which it ends:

- tokens computed = those at joining + (clock - joined);
- a sequence needs a new block when the tokens computed before the step fill whole blocks. That is once in
  `block_size` steps, always at the same phase of the clock. A count per phase gives the blocks that the next
  step needs;
- a heap of end clocks gives the sequences that finish; stale entries are skipped when they come up.

The clock advances when a step begins. A sequence that skips a step, because the token budget ran out before
it, is shifted by one.
"""

import heapq
import itertools
from collections.abc import KeysView

from serve_app.engine_model.sequences import EngineSequence, SequenceState


class DecodingSet:
    """Sequences that generate one token per step.

    Attributes:
        clock: steps begun in which the members decode.
        context_tokens: sum of the members' computed tokens, including that of a step under way.
    """

    __slots__ = ("_block_size", "_ending", "_entries", "_members", "_phases", "clock", "context_tokens")

    def __init__(self, block_size: int) -> None:
        self.clock = 0
        self.context_tokens = 0
        self._block_size = block_size
        self._members: dict[EngineSequence, None] = {}
        self._phases = [0] * block_size
        self._ending: list[tuple[int, int, EngineSequence]] = []
        # Numbers the heap's entries: equal clocks keep their order, and sequences are never compared.
        self._entries = itertools.count()

    def __len__(self) -> int:
        return len(self._members)

    def __contains__(self, sequence: EngineSequence) -> bool:
        return sequence in self._members

    def members(self) -> KeysView[EngineSequence]:
        """The decoding sequences, in the order in which they joined."""
        return self._members.keys()

    def join(self, sequence: EngineSequence) -> None:
        """Add a sequence with at least one token still to generate; it decodes from the next step on."""
        sequence.state = SequenceState.DECODING
        sequence.joined_clock = self.clock
        self._members[sequence] = None
        self.context_tokens += sequence.computed_tokens
        self._phases[self._phase(sequence)] += 1
        self._schedule_end(sequence, self.clock + sequence.target_tokens - sequence.output_tokens)

    def leave(self, sequence: EngineSequence, *, step_under_way: bool) -> None:
        """Remove a member and write its progress into it.

        Args:
            sequence: the member.
            step_under_way: the clock counts a step whose tokens are not generated yet.
        """
        self._phases[self._phase(sequence)] -= 1
        sequence.computed_tokens = self.computed_tokens(sequence)
        sequence.output_tokens = self.output_tokens(sequence, step_under_way=step_under_way)
        sequence.blocks = -(-sequence.computed_tokens // self._block_size)
        self.context_tokens -= sequence.computed_tokens
        del self._members[sequence]

    def begin_step(self) -> None:
        """Advance the clock for a step in which every member decodes."""
        self.clock += 1
        self.context_tokens += len(self._members)

    def begin_steps(self, steps: int) -> None:
        """Advance the clock by several steps; no member may end before the last of them."""
        self.clock += steps
        self.context_tokens += steps * len(self._members)

    def skip_step(self, sequence: EngineSequence) -> None:
        """Undo, for this member, the step that `begin_step` has just begun."""
        self._phases[self._phase(sequence)] -= 1
        sequence.joined_clock += 1
        self._phases[self._phase(sequence)] += 1
        self.context_tokens -= 1
        self._schedule_end(sequence, sequence.finish_clock + 1)

    def pop_ended(self) -> list[EngineSequence]:
        """Remove and return the members that generate their last token in the step that ends now."""
        ended: list[EngineSequence] = []
        heap = self._ending
        while heap and heap[0][0] <= self.clock:
            clock, _, sequence = heapq.heappop(heap)
            if clock == sequence.finish_clock and sequence in self._members:
                # Removed at once: a sequence that left and rejoined may have two entries for the same clock.
                self.leave(sequence, step_under_way=False)
                ended.append(sequence)
        return ended

    def blocks_for_next_step(self) -> int:
        """New KV blocks that the members need for their next step."""
        return self._phases[self.clock % self._block_size]

    def needs_block(self, sequence: EngineSequence) -> bool:
        """Whether this member needs a new block for its next step."""
        return self.computed_tokens(sequence) % self._block_size == 0

    def blocks_for(self, steps: int) -> int:
        """New KV blocks that the members need to decode `steps` times."""
        cycles, rest = divmod(steps, self._block_size)
        blocks = cycles * len(self._members)
        for ahead in range(rest):
            blocks += self._phases[(self.clock + ahead) % self._block_size]
        return blocks

    def steps_within(self, blocks: int) -> int:
        """Steps that the members can make with `blocks` free blocks; there must be a member."""
        cycles, blocks_left = divmod(blocks, len(self._members))
        steps = cycles * self._block_size
        for ahead in range(self._block_size):
            blocks_left -= self._phases[(self.clock + ahead) % self._block_size]
            if blocks_left < 0:
                break
            steps += 1
        return steps

    def steps_to_first_end(self) -> int:
        """Steps until the first member generates its last token; there must be a member."""
        heap = self._ending
        while heap[0][0] != heap[0][2].finish_clock or heap[0][2] not in self._members:
            heapq.heappop(heap)
        return heap[0][0] - self.clock

    def computed_tokens(self, sequence: EngineSequence) -> int:
        """Tokens of this member with KV entries, including that of a step under way."""
        return sequence.computed_tokens + self.clock - sequence.joined_clock

    def output_tokens(self, sequence: EngineSequence, *, step_under_way: bool) -> int:
        """Tokens that this member has generated."""
        return sequence.output_tokens + max(0, self.clock - sequence.joined_clock - step_under_way)

    def _phase(self, sequence: EngineSequence) -> int:
        return (sequence.joined_clock - sequence.computed_tokens) % self._block_size

    def _schedule_end(self, sequence: EngineSequence, clock: int) -> None:
        sequence.finish_clock = clock
        heapq.heappush(self._ending, (clock, next(self._entries), sequence))
