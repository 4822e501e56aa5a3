"""Continuous batching: chooses what the next step computes, as vLLM's V1 scheduler does.

Rules, in order:

1. A step computes at most `max_num_batched_tokens` tokens. A decoding sequence uses one. A prefill uses a
   chunk: the rest of its prompt, limited by the remaining budget. If the engine has another sequence,
   `long_prefill_token_threshold` also limits the chunk.
2. Running sequences are scheduled first, in order of admission. When the budget is spent, the rest skip the
   step. KV blocks are allocated as tokens are computed, never ahead.
3. A running sequence that finds no free block preempts the last admitted (FCFS) or the least urgent
   (priority) sequence, possibly itself. The victim loses its blocks, returns to the front of the waiting
   queue, and recomputes its prompt and the tokens that it had generated.
4. If nothing was preempted, waiting sequences are admitted from the head while there is budget and fewer than
   `max_num_seqs` run. The head's prefix is read from the cache, except for the last token, which is computed.
   A head that does not fit blocks those behind it.

Rules 1 to 3 are applied to all running sequences at once if their order cannot matter, which is nearly
always. The cost of a step then does not grow with the number of decoding sequences.

Not modelled: speculative decoding, the one-step lag of asynchronous scheduling, LoRA, encoders, KV transfer.

`DecodingSet` advances all decoding sequences of a batch together. Each gains one token per step, so nothing
is counted per sequence and step. A clock counts the steps in which they decode, and a sequence stores the
clock at which it joined and at which it ends:

- tokens computed = those at joining + (clock - joined).
- A sequence needs a new block when the tokens computed before the step fill whole blocks. That is once in
  `block_size` steps, always at the same phase of the clock. A count per phase gives the blocks that the next
  step needs.
- A heap of end clocks yields the sequences that finish; stale entries are skipped when they reach the top.

The clock advances when a step begins. A sequence that skips a step, because the token budget ran out before
it, is shifted by one.
"""

import heapq
import itertools
from collections.abc import KeysView
from dataclasses import dataclass, field

from serve_app.engines.model.sequences import (
    BlockName,
    EngineModelSettings,
    EngineSequence,
    KVBlocks,
    SchedulingPolicy,
    SequenceState,
    WaitingQueue,
)
from serve_app.engines.model.step_time import attended_pairs


@dataclass(slots=True)
class Batch:
    """Content of one step.

    Attributes:
        budget_left: tokens that the step could still compute.
        prefilling: sequences with a prompt chunk in the step.
        prefill_tokens: total tokens of those chunks.
        attended_pairs: pairs of a prompt token and a token that it attends to.
        sequences: number of decoding sequences in the step.
        context_tokens: sum of their contexts.
        preempted: sequences that were preempted while the step was scheduled.
        has_skipped: whether a decoding sequence skips the step for lack of budget.
        awaits_eviction: whether the head of the waiting queue may fit once its cached blocks are evicted. Its
            first chunk then needs fewer blocks than the cached prefix and the chunk behind it.
    """

    budget_left: int
    prefilling: list[EngineSequence] = field(default_factory=list)
    prefill_tokens: int = 0
    attended_pairs: int = 0
    sequences: int = 0
    context_tokens: int = 0
    admitted: list[EngineSequence] = field(default_factory=list)
    preempted: list[EngineSequence] = field(default_factory=list)
    has_skipped: bool = False
    awaits_eviction: bool = False

    @property
    def is_empty(self) -> bool:
        """True if there is nothing to compute."""
        return not self.sequences and not self.prefill_tokens


class DecodingSet:
    """Sequences that generate one token per step.

    Attributes:
        clock: number of steps in which the members decode, including the current step.
        context_tokens: sum of the members' computed tokens, including the current step.
    """

    __slots__ = ("_block_size", "_ending", "_entries", "_members", "_phases", "clock", "context_tokens")

    def __init__(self, block_size: int) -> None:
        self.clock = 0
        self.context_tokens = 0
        self._block_size = block_size
        self._members: dict[EngineSequence, None] = {}
        self._phases = [0] * block_size
        self._ending: list[tuple[int, int, EngineSequence]] = []
        # Tie-breaker of heap entries: equal clocks retain their order, and sequences are never compared.
        self._entries = itertools.count()

    def __len__(self) -> int:
        return len(self._members)

    def __contains__(self, sequence: EngineSequence) -> bool:
        return sequence in self._members

    def members(self) -> KeysView[EngineSequence]:
        """Return the decoding sequences in the order in which they joined."""
        return self._members.keys()

    def add(self, sequence: EngineSequence) -> None:
        """Add a sequence with at least one token to generate. It decodes from the next step on."""
        sequence.state = SequenceState.DECODING
        sequence.joined_clock = self.clock
        self._members[sequence] = None
        self.context_tokens += sequence.computed_tokens
        self._phases[self._phase(sequence)] += 1
        self._schedule_end(sequence, self.clock + sequence.target_tokens - sequence.output_tokens)

    def remove(self, sequence: EngineSequence, *, step_under_way: bool) -> None:
        """Remove a member and write its progress into the sequence.

        Args:
            step_under_way: whether the clock includes a step whose tokens are not generated yet.
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
        """Advance the clock by several steps. No member may end before the last of them."""
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
                # Remove immediately: a sequence that left and rejoined may have two entries for the same
                # clock.
                self.remove(sequence, step_under_way=False)
                ended.append(sequence)
        return ended

    def blocks_for_next_step(self) -> int:
        """Return the new KV blocks that the members need for their next step."""
        return self._phases[self.clock % self._block_size]

    def needs_block(self, sequence: EngineSequence) -> bool:
        """Return whether this member needs a new block for its next step."""
        return self.computed_tokens(sequence) % self._block_size == 0

    def blocks_for(self, steps: int) -> int:
        """Return the new KV blocks that the members need to decode `steps` times."""
        cycles, rest = divmod(steps, self._block_size)
        blocks = cycles * len(self._members)
        for ahead in range(rest):
            blocks += self._phases[(self.clock + ahead) % self._block_size]
        return blocks

    def steps_within(self, blocks: int) -> int:
        """Return the steps that the members can make with `blocks` free blocks. Requires a member."""
        cycles, blocks_left = divmod(blocks, len(self._members))
        steps = cycles * self._block_size
        for ahead in range(self._block_size):
            blocks_left -= self._phases[(self.clock + ahead) % self._block_size]
            if blocks_left < 0:
                break
            steps += 1
        return steps

    def steps_to_first_end(self) -> int:
        """Return the steps until the first member generates its last token. Requires a member."""
        heap = self._ending
        while heap[0][0] != heap[0][2].finish_clock or heap[0][2] not in self._members:
            heapq.heappop(heap)
        return heap[0][0] - self.clock

    def computed_tokens(self, sequence: EngineSequence) -> int:
        """Return the member's tokens with KV entries, including the current step."""
        return sequence.computed_tokens + self.clock - sequence.joined_clock

    def output_tokens(self, sequence: EngineSequence, *, step_under_way: bool) -> int:
        """Return the tokens that the member has generated."""
        return sequence.output_tokens + max(0, self.clock - sequence.joined_clock - step_under_way)

    def _phase(self, sequence: EngineSequence) -> int:
        return (sequence.joined_clock - sequence.computed_tokens) % self._block_size

    def _schedule_end(self, sequence: EngineSequence, clock: int) -> None:
        sequence.finish_clock = clock
        heapq.heappush(self._ending, (clock, next(self._entries), sequence))


class Batcher:
    """The engine's sequences and KV blocks, and the choice of what runs next.

    Attributes:
        waiting: the engine's waiting queue.
        decoding: running sequences that generate.
        prefix_queries_tokens, prefix_hits_tokens: tokens looked up and found in the prefix cache since the
            start.
    """

    def __init__(self, settings: EngineModelSettings) -> None:
        self._settings = settings
        self._block_size = settings.block_size
        self.waiting = WaitingQueue(settings.scheduling_policy)
        self.decoding = DecodingSet(settings.block_size)
        self.kv = KVBlocks(settings.kv_blocks)
        # Dictionaries preserve the order of admission and remove members at constant cost.
        self._running: dict[EngineSequence, None] = {}
        self._prefilling: dict[EngineSequence, None] = {}
        self.prefix_queries_tokens = 0
        self.prefix_hits_tokens = 0
        self.preemptions = 0

    @property
    def running(self) -> KeysView[EngineSequence]:
        """Admitted sequences in order of admission."""
        return self._running.keys()

    def add(self, sequence: EngineSequence) -> None:
        """Queue a new sequence."""
        sequence.state = SequenceState.WAITING
        if self._settings.prefix_caching:
            full_blocks = sequence.prompt_tokens // self._block_size
            sequence.block_names = list(sequence.block_hashes[:full_blocks])
        self.waiting.add(sequence)

    def next_batch(self) -> Batch:
        """Choose the next step, allocate its blocks, and count its tokens as computed."""
        batch = Batch(budget_left=self._settings.max_num_batched_tokens)
        chunk_limit = self._chunk_limit()
        if not self._schedule_all(batch, chunk_limit):
            self._schedule_in_order(batch, chunk_limit)
        if not batch.preempted:
            self._admit(batch, chunk_limit)
        return batch

    def complete(self, batch: Batch) -> tuple[list[EngineSequence], list[EngineSequence]]:
        """Generate the tokens of an ended step. Return sequences with a first token, and finished ones."""
        finished = self.decoding.pop_ended()
        first_tokens: list[EngineSequence] = []
        for sequence in batch.prefilling:
            # A sequence may have been aborted during the step.
            if (
                sequence.state is not SequenceState.PREFILLING
                or sequence.computed_tokens < sequence.tokens_to_compute
            ):
                continue
            del self._prefilling[sequence]
            if sequence.target_tokens and not sequence.output_tokens:
                first_tokens.append(sequence)
            if sequence.output_tokens + 1 >= sequence.target_tokens:
                sequence.output_tokens = sequence.target_tokens
                finished.append(sequence)
            else:
                sequence.output_tokens += 1
                self.decoding.add(sequence)
        for sequence in finished:
            self._conclude(sequence, SequenceState.FINISHED)
        return first_tokens, finished

    def abort(self, sequence: EngineSequence, *, step_under_way: bool) -> bool:
        """Remove a sequence in any state. Return False if it has already ended."""
        match sequence.state:
            case SequenceState.WAITING:
                self.waiting.remove(sequence)
            case SequenceState.PREFILLING:
                del self._prefilling[sequence]
            case SequenceState.DECODING:
                self.decoding.remove(sequence, step_under_way=step_under_way)
            case _:
                return False
        self._conclude(sequence, SequenceState.ABORTED)
        return True

    # -- running sequences ------------------------------------------------------------------------------

    def _chunk_limit(self) -> int:
        """Return the largest chunk of one prefill in the step. A single sequence delays no other."""
        threshold = self._settings.long_prefill_token_threshold
        if threshold and len(self._running) + len(self.waiting) > 1:
            return threshold
        return self._settings.max_num_batched_tokens

    def _schedule_all(self, batch: Batch, chunk_limit: int) -> bool:
        """Continue all running sequences if budget and blocks suffice; otherwise return False unchanged."""
        left = batch.budget_left - len(self.decoding)
        blocks = decoding_blocks = self.decoding.blocks_for_next_step()
        chunks: list[tuple[EngineSequence, int, int]] = []
        for sequence in self._prefilling:
            chunk = min(sequence.tokens_to_compute - sequence.computed_tokens, chunk_limit)
            if chunk > left:
                # A truncated chunk uses up the budget, so a sequence behind it gets none.
                if sequence is not next(reversed(self._running)):
                    return False
                chunk = left
            if chunk:
                left -= chunk
                new_blocks = self._new_blocks(sequence, chunk)
                blocks += new_blocks
                chunks.append((sequence, chunk, new_blocks))
        if blocks > self.kv.free:
            return False
        batch.budget_left = left
        if decoding_blocks:
            self.kv.allocate(decoding_blocks)
        self._decode_all(batch)
        for sequence, chunk, new_blocks in chunks:
            self.kv.allocate(new_blocks)
            self._prefill(batch, sequence, chunk, new_blocks)
        return True

    def _schedule_in_order(self, batch: Batch, chunk_limit: int) -> None:
        """Continue running sequences one by one, preempting when no block is free."""
        taken: dict[EngineSequence, tuple[int, int]] = {}
        for sequence in list(self._running):
            if sequence.state is SequenceState.WAITING:
                continue
            if not batch.budget_left:
                break
            if sequence in self.decoding:
                tokens, blocks = 1, int(self.decoding.needs_block(sequence))
            else:
                tokens = min(
                    sequence.tokens_to_compute - sequence.computed_tokens, chunk_limit, batch.budget_left
                )
                blocks = self._new_blocks(sequence, tokens)
            if not self._free_blocks(batch, sequence, blocks, taken):
                break
            self.kv.allocate(blocks)
            batch.budget_left -= tokens
            taken[sequence] = (tokens, blocks)
        self._apply_schedule(batch, taken)

    def _free_blocks(
        self,
        batch: Batch,
        sequence: EngineSequence,
        blocks: int,
        taken: dict[EngineSequence, tuple[int, int]],
    ) -> bool:
        """Preempt until `blocks` are free. Return False if the sequence itself was preempted."""
        while blocks > self.kv.free:
            victim = self._victim()
            tokens, blocks_taken = taken.pop(victim, (0, 0))
            batch.budget_left += tokens
            self.kv.release(blocks_taken, ())
            self._preempt(victim)
            batch.preempted.append(victim)
            if victim is sequence:
                return False
        return True

    def _victim(self) -> EngineSequence:
        if self._settings.scheduling_policy is SchedulingPolicy.PRIORITY:
            return max(self._running, key=lambda sequence: sequence.urgency)
        return next(reversed(self._running))

    def _preempt(self, victim: EngineSequence) -> None:
        if victim.state is SequenceState.DECODING:
            self.decoding.remove(victim, step_under_way=False)
        else:
            del self._prefilling[victim]
        del self._running[victim]
        if self._settings.prefix_caching:
            self._name_all_blocks(victim)
        self._release(victim)
        victim.computed_tokens = 0
        victim.preemptions += 1
        victim.state = SequenceState.WAITING
        self.preemptions += 1
        self.waiting.put_back(victim)

    def _apply_schedule(self, batch: Batch, taken: dict[EngineSequence, tuple[int, int]]) -> None:
        """Compute what `_schedule_in_order` has scheduled. The other sequences skip the step."""
        skipped = [sequence for sequence in self.decoding.members() if sequence not in taken]
        self._decode_all(batch)
        for sequence in skipped:
            batch.context_tokens -= self.decoding.computed_tokens(sequence)
            self.decoding.skip_step(sequence)
        batch.sequences -= len(skipped)
        batch.has_skipped = bool(skipped)
        for sequence, (tokens, blocks) in taken.items():
            if sequence.state is SequenceState.PREFILLING:
                self._prefill(batch, sequence, tokens, blocks)

    # -- waiting sequences ------------------------------------------------------------------------------

    def _admit(self, batch: Batch, chunk_limit: int) -> None:
        """Admit waiting sequences from the head while budget, batch slots and blocks last."""
        while batch.budget_left and len(self.waiting) and len(self._running) < self._settings.max_num_seqs:
            sequence = self.waiting.head()
            known = sequence.tokens_to_compute
            hits = 0
            if sequence.block_names:
                hits = self.kv.count_hits(sequence.block_names, (known - 1) // self._block_size)
            cached = hits * self._block_size
            chunk = min(known - cached, chunk_limit, batch.budget_left)
            reach = known if self._settings.full_prompt_must_fit else cached + chunk
            shared = sequence.block_names[:hits]
            if not self.kv.fits(-(-reach // self._block_size), shared):
                batch.awaits_eviction = hits > 0 and not self._settings.full_prompt_must_fit
                return
            self.waiting.pop()
            self._start(sequence, shared)
            new_blocks = self._new_blocks(sequence, chunk)
            self.kv.allocate(new_blocks)
            batch.budget_left -= chunk
            batch.admitted.append(sequence)
            self._prefill(batch, sequence, chunk, new_blocks)

    def _start(self, sequence: EngineSequence, shared: list[BlockName]) -> None:
        """Start a waiting sequence with its cached prefix."""
        self.kv.share(shared)
        sequence.named_blocks = shared
        sequence.blocks = len(shared)
        sequence.computed_tokens = len(shared) * self._block_size
        sequence.state = SequenceState.PREFILLING
        self._running[sequence] = None
        self._prefilling[sequence] = None
        if self._settings.prefix_caching and not sequence.preemptions:
            # vLLM's counters also exclude resumed sequences.
            sequence.cached_tokens = sequence.computed_tokens
            self.prefix_queries_tokens += sequence.tokens_to_compute
            self.prefix_hits_tokens += sequence.computed_tokens

    # -- shared steps -----------------------------------------------------------------------------------

    def _new_blocks(self, sequence: EngineSequence, tokens: int) -> int:
        """Return the blocks to allocate before a prefilling sequence computes `tokens` more tokens."""
        return -(-(sequence.computed_tokens + tokens) // self._block_size) - sequence.blocks

    def _decode_all(self, batch: Batch) -> None:
        sequences = len(self.decoding)
        if sequences:
            self.decoding.begin_step()
            batch.sequences = sequences
            batch.context_tokens = self.decoding.context_tokens

    def _prefill(self, batch: Batch, sequence: EngineSequence, chunk: int, new_blocks: int) -> None:
        """Count a chunk as computed, after `new_blocks` were allocated for it."""
        batch.prefilling.append(sequence)
        batch.prefill_tokens += chunk
        batch.attended_pairs += attended_pairs(sequence.computed_tokens, chunk)
        sequence.blocks += new_blocks
        before_tokens = sequence.computed_tokens
        sequence.computed_tokens += chunk
        if sequence.block_names:
            first_block = before_tokens // self._block_size
            last_block = sequence.computed_tokens // self._block_size
            for name in sequence.block_names[first_block:last_block]:
                if self.kv.name(name):
                    sequence.named_blocks.append(name)

    def _name_all_blocks(self, victim: EngineSequence) -> None:
        """Name a victim's full blocks in the prefix cache, so that it can reuse those not yet evicted."""
        full_blocks = victim.computed_tokens // self._block_size
        names = victim.block_names
        names.extend((victim.number, index) for index in range(len(names), full_blocks))
        held = set(victim.named_blocks)
        for name in names[:full_blocks]:
            if name not in held and self.kv.name(name):
                victim.named_blocks.append(name)

    def _name_answer(self, sequence: EngineSequence) -> None:
        """Name the full blocks behind the prompt's. The last token of an answer is never computed."""
        last_block = sequence.computed_tokens // self._block_size
        for name in sequence.block_hashes[len(sequence.block_names) : last_block]:
            if self.kv.name(name):
                sequence.named_blocks.append(name)

    def _release(self, sequence: EngineSequence) -> None:
        self.kv.release(sequence.blocks - len(sequence.named_blocks), sequence.named_blocks)
        sequence.blocks = 0
        sequence.named_blocks = []

    def _conclude(self, sequence: EngineSequence, state: SequenceState) -> None:
        """Release a sequence that has ended. The prefix cache retains its blocks."""
        self._running.pop(sequence, None)
        if len(sequence.block_hashes) > len(sequence.block_names) > 0 and not sequence.preemptions:
            self._name_answer(sequence)
        self._release(sequence)
        if sequence.preemptions:
            self.kv.discard(name for name in sequence.block_names if isinstance(name, tuple))
        sequence.state = state
