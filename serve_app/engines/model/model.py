"""The engine model: continuous batching of sequences, step by step, on a clock that the caller owns.

- `EngineModel`: an LLM engine as a pure state machine.
- `Batcher`: chooses what the next step computes, as vLLM's V1 scheduler does.
- `KVBlocks`: the paged KV cache as block counts.
- `DecodingSet`: advances all decoding sequences of a batch together.
- `RecentMean`: the mean over the last seconds of a cumulative sum and count, such as an engine's counters.

`EngineModel`. There are two drivers: the emulated engine sleeps until a step ends, the simulator schedules an
event. Both run a step like this:

    model.add(sequence, now)              # at any time
    ends_at = model.begin_step(now)       # None if idle
    ...                                   # more add() and abort(); then read `model.ends_at` again
    outcome = model.end_step()            # at `ends_at`: first tokens, finished sequences

A driver that does not need every token can combine steps into a *run*. `begin_step(now, max_steps=N)`
combines up to N iterations with the same decoding sequences and nothing else. A run ends with the first
sequence that ends, or before the first that finds no free block; its duration is computed in closed form.
`add` and `abort` can change the batch, so they cut the run after the current iteration. Up to rounding, the
results equal those of single steps. A sequence that is added at the instant at which an iteration ends joins
the next one.

`KVBlocks`. Blocks need no identity here. Every block is in exactly one of four states, so `total` is always

    private (held by one sequence) + named and held + cached (full, not held) + blank

`free` is cached + blank. When no blank block is left, the least recently used cached block is evicted. A name
is the content hash of a full block of tokens; sequences with the same name share the block. vLLM's block pool
does the same: blocks without a hash go to the front of its free queue, blocks with one to the back. It hashes
every full block, so full blocks without a name here, which no sequence will ask for, are cached as well and
evicted in their turn. A sequence that computes a block that is already cached has a copy of it.

`Batcher`. Rules, in order:

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

`DecodingSet`. Each sequence gains one token per step, so nothing is counted per sequence and step. A clock
counts the steps in which they decode, and a sequence stores the clock at which it joined and at which it
ends:

- tokens computed = those at joining + (clock - joined).
- A sequence needs a new block when the tokens computed before the step fill whole blocks. That is once in
  `block_size` steps, always at the same phase of the clock. A count per phase gives the blocks that the next
  step needs.
- A heap of end clocks yields the sequences that finish; stale entries are skipped when they reach the top.

The clock advances when a step begins. A sequence that skips a step, because the token budget ran out before
it, is shifted by one.
"""

import bisect
import enum
import heapq
import itertools
from collections import OrderedDict, deque
from collections.abc import Iterable, Iterator, KeysView, Sequence
from dataclasses import dataclass, field
from typing import Annotated, NamedTuple

from serve_app.core.settings_base import NOT_NEGATIVE, at_least, settings
from serve_app.engines.model.step_time import StepTimeModel, attended_pairs

# Long enough to smooth single steps, short enough that a TPOT gate closes before a queue builds up.
TPOT_WINDOW_S = 2.0


class RecentMean:
    """Mean over the last `window_s` seconds of a cumulative sum and count."""

    def __init__(self, window_s: float = TPOT_WINDOW_S) -> None:
        self._window_s = window_s
        # (time, sum, count), oldest first. The first is the state at the start of the window.
        self._marks: deque[tuple[float, float, int]] = deque()

    def record(self, total: float, count: int, now: float) -> None:
        """Record the sum and the count at `now`."""
        if self._marks and count < self._marks[-1][2]:
            self._marks.clear()  # the counters were reset: the server restarted
        self._marks.append((now, total, count))
        self._forget(now)

    def mean(self, now: float) -> float | None:
        """Return the mean over the window that ends at `now`, or None if nothing was counted in it."""
        self._forget(now)
        if not self._marks:
            return None
        _, first_total, first_count = self._marks[0]
        _, last_total, last_count = self._marks[-1]
        counted = last_count - first_count
        return (last_total - first_total) / counted if counted > 0 else None

    def _forget(self, now: float) -> None:
        while len(self._marks) > 1 and self._marks[1][0] <= now - self._window_s:
            self._marks.popleft()


# A content hash of a full prompt block, or the private name (sequence number, block index) of a preempted
# sequence's block, which stays in the prefix cache until it is evicted.
BlockName = int | tuple[int, int]


class Copy(NamedTuple):
    """Another block with the content of a named one, such as the last block of a repeated prompt."""

    name: BlockName
    number: int


Block = BlockName | Copy
# No sequence has this number.
_NAMELESS = -1


class SequenceState(enum.Enum):
    """State of a sequence in the engine."""

    NEW = "new"
    WAITING = "waiting"
    PREFILLING = "prefilling"
    DECODING = "decoding"
    FINISHED = "finished"
    ABORTED = "aborted"


@dataclass(slots=True, eq=False)
class EngineSequence:
    """A sequence of tokens to compute. The caller sets the first group of fields, the model the rest.

    Attributes:
        sequence_id: unique among the sequences in the engine.
        prompt_tokens: length of the prompt, at least 1.
        target_tokens: output tokens after which it ends; 0 computes only the prompt (embeddings).
        arrived_at: arrival at the engine, in seconds on the model's clock.
        priority: lower values are scheduled first; used only with the priority policy.
        block_hashes: content hashes of the prompt's full blocks, for the prefix cache; may be empty. Those
            of the answer may follow.
        output_tokens: tokens generated so far; while it decodes, read `EngineModel.output_tokens`.
        computed_tokens: tokens whose KV entries exist; maintained while it is not decoding.
        cached_tokens: prompt tokens found in the prefix cache when it was first scheduled.
        scheduled_at, first_token_at, finished_at: seconds on the model's clock, None before the event.
    """

    sequence_id: str
    prompt_tokens: int
    target_tokens: int
    arrived_at: float
    priority: int = 0
    block_hashes: Sequence[int] = ()

    state: SequenceState = SequenceState.NEW
    number: int = 0
    output_tokens: int = 0
    computed_tokens: int = 0
    cached_tokens: int = 0
    preemptions: int = 0
    scheduled_at: float | None = None
    first_token_at: float | None = None
    finished_at: float | None = None
    # Held blocks: those under a name in the prefix cache, and all of them (named and private).
    named_blocks: list[Block] = field(default_factory=list)
    blocks: int = 0
    # Names of the leading full blocks: the hashes of the prompt and of the answer so far, and private names
    # after a preemption.
    block_names: list[BlockName] = field(default_factory=list)
    # Clocks of `DecodingSet` at which the sequence joined and at which it ends.
    joined_clock: int = 0
    finish_clock: int = 0

    @property
    def tokens_to_compute(self) -> int:
        """Tokens to compute before it can generate: the prompt, and outputs from before a preemption."""
        return self.prompt_tokens + self.output_tokens

    def check(self, max_model_len: int) -> None:
        """Raise `ValueError` if it cannot be added to an engine with this context limit."""
        if self.state is not SequenceState.NEW:
            raise ValueError(f"sequence {self.sequence_id} is {self.state.value}, it cannot be added again")
        total = self.prompt_tokens + self.target_tokens
        if self.prompt_tokens < 1 or self.target_tokens < 0 or total > max_model_len:
            raise ValueError(
                f"sequence of {self.prompt_tokens} + {self.target_tokens} tokens: the prompt needs "
                f"at least 1, and both together at most max_model_len = {max_model_len}"
            )

    @property
    def urgency(self) -> tuple[int, float, int]:
        """Sort key of the priority policy: lower value first, then arrival."""
        return (self.priority, self.arrived_at, self.number)


Key = tuple[float, ...]


class SchedulingPolicy(enum.StrEnum):
    """Order of the engine's waiting queue, named as in vLLM's `--scheduling-policy`."""

    FCFS = "fcfs"
    PRIORITY = "priority"


class WaitingQueue:
    """Waiting queue of the engine.

    FCFS orders by arrival, with preempted sequences at the front. PRIORITY orders by the lowest value, then
    by arrival; as in vLLM, a preempted sequence gains no precedence.
    """

    def __init__(self, policy: SchedulingPolicy) -> None:
        self._by_priority = policy is SchedulingPolicy.PRIORITY
        # A removed sequence remains in the heap until it reaches the top. It is never queued again.
        self._heap: list[tuple[Key, EngineSequence]] = []
        self._keys: dict[EngineSequence, Key] = {}
        self._front = self._back = 0

    def __len__(self) -> int:
        return len(self._keys)

    def __iter__(self) -> Iterator[EngineSequence]:
        return iter(sorted(self._keys, key=self._keys.__getitem__))

    def add(self, sequence: EngineSequence) -> None:
        """Queue a new sequence."""
        self._back += 1
        self._push(sequence, self._back)

    def put_back(self, sequence: EngineSequence) -> None:
        """Queue a preempted sequence."""
        self._front -= 1
        self._push(sequence, self._front)

    def head(self) -> EngineSequence:
        """Return the next sequence to run. The queue must not be empty."""
        while self._heap[0][1] not in self._keys:
            heapq.heappop(self._heap)
        return self._heap[0][1]

    def pop(self) -> EngineSequence:
        """Remove and return the head."""
        sequence = self.head()
        heapq.heappop(self._heap)
        del self._keys[sequence]
        return sequence

    def remove(self, sequence: EngineSequence) -> None:
        """Remove any sequence."""
        del self._keys[sequence]

    def _push(self, sequence: EngineSequence, position: int) -> None:
        key: Key = sequence.urgency if self._by_priority else (position,)
        self._keys[sequence] = key
        heapq.heappush(self._heap, (key, sequence))


@settings
class EngineModelSettings:
    """Limits of one emulated engine.

    Attributes:
        max_model_len: context limit, prompt and output together, in tokens.
        kv_tokens: capacity of the KV cache in tokens; rounded down to whole blocks.
    """

    max_model_len: Annotated[int, at_least(1)]
    kv_tokens: Annotated[int, at_least(1)]
    # Larger blocks waste more of the cache at the end of each sequence; 16 is vLLM's default on GPUs.
    block_size: Annotated[int, at_least(1)] = 16
    # More sequences per step increase throughput and lengthen the step for each of them.
    max_num_seqs: Annotated[int, at_least(1)] = 256
    # More prompt tokens per step mean faster prefills and longer stalls for decoding sequences.
    max_num_batched_tokens: Annotated[int, at_least(1)] = 2_048
    # With 0, one long prefill may use the whole budget of a step; with a limit, short prompts overtake it.
    long_prefill_token_threshold: Annotated[int, NOT_NEGATIVE.hint("0 means no limit")] = 0
    scheduling_policy: SchedulingPolicy = SchedulingPolicy.FCFS
    prefix_caching: bool = True
    # Admit a prompt only if all of it fits into free blocks (`scheduler_reserve_full_isl`, on in vLLM). If
    # off, the first chunk is enough, and prompts that are admitted together preempt each other.
    full_prompt_must_fit: bool = True

    def __post_init__(self) -> None:
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise ValueError(
                f"max_num_batched_tokens ({self.max_num_batched_tokens}) must be at least max_num_seqs "
                f"({self.max_num_seqs}), or decoding sequences starve: raise the first or lower the second"
            )
        if self.kv_blocks * self.block_size < self.max_model_len:
            raise ValueError(
                f"max_model_len ({self.max_model_len:,}) does not fit into the KV cache "
                f"({self.kv_tokens:,} tokens in blocks of {self.block_size}): such a sequence could never "
                "finish; lower max_model_len"
            )

    @property
    def kv_blocks(self) -> int:
        """Number of blocks in the KV cache."""
        return self.kv_tokens // self.block_size


class KVBlocks:
    """Pool of equal blocks with a prefix cache.

    Attributes:
        blank: blocks that nothing is stored in, or less than a block.
        cached: full blocks that no sequence holds.
    """

    __slots__ = ("_cached", "_copies", "_holders", "_numbers", "blank", "cached", "total")

    def __init__(self, total: int) -> None:
        if total < 1:
            raise ValueError(f"the KV cache needs at least one block, got {total}")
        self.total = total
        self.blank = total
        self.cached = 0
        self._holders: dict[Block, int] = {}
        # Blocks, the next to evict first. Several without a name, which were released together, have one
        # entry.
        self._cached: OrderedDict[Block, int] = OrderedDict()
        # All blocks of names with copies, the first named first.
        self._copies: dict[BlockName, list[Block]] = {}
        self._numbers = itertools.count()

    def __repr__(self) -> str:
        named = len(self._holders)
        return f"<KVBlocks total={self.total} free={self.free} cached={self.cached} named={named}>"

    @property
    def free(self) -> int:
        """Blocks that can be allocated now, including cached ones."""
        return self.blank + self.cached

    def find(self, names: Sequence[BlockName], limit: int) -> list[Block]:
        """Return the leading blocks that are in the cache, at most `limit`."""
        found: list[Block] = []
        for name in names[:limit]:
            block = self._copies[name][0] if name in self._copies else name
            if block not in self._holders and block not in self._cached:
                break
            found.append(block)
        return found

    def fits(self, blocks: int, hits: Sequence[Block] = ()) -> bool:
        """Return whether `blocks` fit if the leading ones, `hits`, are shared from the cache."""
        needed = blocks - sum(1 for block in hits if block in self._holders)
        return needed <= self.free

    def share(self, hits: Iterable[Block]) -> None:
        """Hold cached blocks that `find` has found."""
        for block in hits:
            holders = self._holders.get(block)
            if holders is None:
                del self._cached[block]
                self.cached -= 1
                self._holders[block] = 1
            else:
                self._holders[block] = holders + 1

    def allocate(self, blocks: int) -> None:
        """Allocate private blocks. The caller must have checked that they fit."""
        if blocks <= self.blank:
            self.blank -= blocks
            return
        evicted = blocks - self.blank
        if evicted > self.cached:
            raise ValueError(f"{blocks} blocks wanted, only {self.free} of {self.total} are free")
        self.blank = 0
        self.cached -= evicted
        while evicted:
            block, count = next(iter(self._cached.items()))
            if count > evicted:
                self._cached[block] = count - evicted
                return
            del self._cached[block]
            self._forget_copy(block)
            evicted -= count

    def name(self, name: BlockName) -> Block:
        """Name a private block, and return it: a copy if the name is in use."""
        block: Block = name
        if name in self._copies or name in self._holders or name in self._cached:
            block = Copy(name, next(self._numbers))
            self._copies.setdefault(name, [name]).append(block)
        self._holders[block] = 1
        return block

    def _forget_copy(self, block: Block) -> None:
        name = block.name if isinstance(block, Copy) else block
        if copies := self._copies.get(name):
            copies.remove(block)
            if copies in ([], [name]):
                del self._copies[name]

    def release(self, private: int, named: Sequence[Block] = (), *, full: int = 0) -> None:
        """Free private blocks, of which `full` are cached without a name, and release named ones.

        Those remain cached if no other sequence holds them.
        """
        self.blank += private - full
        self.cached += full
        # The end of a prefix is useless without its beginning, so it is evicted first.
        if full:
            self._cached[(_NAMELESS, next(self._numbers))] = full
        for block in reversed(named):
            holders = self._holders[block] - 1
            if holders:
                self._holders[block] = holders
            else:
                del self._holders[block]
                self._cached[block] = 1
                self.cached += 1


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
        # Decoding sequences whose answers have hashes.
        self._answering: dict[EngineSequence, None] = {}
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
                if self._settings.prefix_caching and len(sequence.block_hashes) > len(sequence.block_names):
                    self._answering[sequence] = None
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
            self.kv.release(blocks_taken)
            self._preempt(victim)
            batch.preempted.append(victim)
            if victim is sequence:
                return False
        return True

    def _victim(self) -> EngineSequence:
        if self._settings.scheduling_policy is SchedulingPolicy.PRIORITY:
            # As in vLLM, the first admitted of several that arrived together, such as outputs of one prompt.
            return max(self._running, key=lambda sequence: sequence.urgency[:2])
        return next(reversed(self._running))

    def _preempt(self, victim: EngineSequence) -> None:
        if victim.state is SequenceState.DECODING:
            self.decoding.remove(victim, step_under_way=False)
        else:
            del self._prefilling[victim]
        del self._running[victim]
        if self._settings.prefix_caching:
            self._name_all_blocks(victim)
        self._answering.pop(victim, None)
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
            hits: list[Block] = []
            if sequence.block_names:
                self.name_answers()
                hits = self.kv.find(sequence.block_names, (known - 1) // self._block_size)
            cached = len(hits) * self._block_size
            chunk = min(known - cached, chunk_limit, batch.budget_left)
            reach = known if self._settings.full_prompt_must_fit else cached + chunk
            if not self.kv.fits(-(-reach // self._block_size), hits):
                batch.awaits_eviction = bool(hits) and not self._settings.full_prompt_must_fit
                return
            self.waiting.pop()
            self._start(sequence, hits)
            new_blocks = self._new_blocks(sequence, chunk)
            self.kv.allocate(new_blocks)
            batch.budget_left -= chunk
            batch.admitted.append(sequence)
            self._prefill(batch, sequence, chunk, new_blocks)

    def _start(self, sequence: EngineSequence, shared: list[Block]) -> None:
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
        if (
            chunk == 1
            and sequence.output_tokens
            and sequence.computed_tokens + 1 == sequence.tokens_to_compute
        ):
            # A sequence that resumes with all but its last token cached decodes.
            batch.sequences += 1
            batch.context_tokens += sequence.tokens_to_compute
        else:
            batch.prefill_tokens += chunk
            batch.attended_pairs += attended_pairs(sequence.computed_tokens, chunk)
        sequence.blocks += new_blocks
        sequence.computed_tokens += chunk
        if sequence.block_names:
            self._name_blocks(sequence, sequence.computed_tokens)

    def name_answers(self) -> None:
        """Name the full blocks that decoding sequences have completed, so that others find them."""
        for sequence in self._answering:
            self._name_blocks(sequence, self.decoding.computed_tokens(sequence))

    def _name_blocks(self, sequence: EngineSequence, computed_tokens: int) -> None:
        """Name the full blocks that have hashes, those of the answer included."""
        full_blocks, names = computed_tokens // self._block_size, sequence.block_names
        names.extend(sequence.block_hashes[len(names) : full_blocks])
        sequence.named_blocks += map(self.kv.name, names[len(sequence.named_blocks) : full_blocks])

    def _name_all_blocks(self, victim: EngineSequence) -> None:
        """Name a victim's full blocks in the prefix cache, so that it can reuse those not yet evicted."""
        self._name_blocks(victim, victim.computed_tokens)
        full_blocks, names = victim.computed_tokens // self._block_size, victim.block_names
        names.extend((victim.number, index) for index in range(len(names), full_blocks))
        self._name_blocks(victim, victim.computed_tokens)

    def _release(self, sequence: EngineSequence) -> None:
        named = len(sequence.named_blocks)
        full = 0
        if self._settings.prefix_caching:
            full = sequence.computed_tokens // self._block_size - named
        self.kv.release(sequence.blocks - named, sequence.named_blocks, full=full)
        sequence.blocks = 0
        sequence.named_blocks = []

    def _conclude(self, sequence: EngineSequence, state: SequenceState) -> None:
        """Release a sequence that has ended. The prefix cache retains its blocks."""
        self._running.pop(sequence, None)
        if sequence in self._answering:
            del self._answering[sequence]
            self._name_blocks(sequence, sequence.computed_tokens)
        self._release(sequence)
        sequence.state = state


# Not frozen, because creating a frozen object takes three times as long and there is one per step.
@dataclass(slots=True)
class StepOutcome:
    """Outcome of a step, or of a run of steps. `finished` sequences carry their times and counts.

    Attributes:
        ended_at: seconds on the model's clock.
        prefill_tokens: prompt tokens computed.
        sequences: decoding sequences in each iteration.
        first_tokens: sequences that generated their first token.
        finished: sequences that generated their last token.
        preempted: sequences that were preempted when the step began.
    """

    ended_at: float
    prefill_tokens: int
    sequences: int
    first_tokens: list[EngineSequence] = field(default_factory=list)
    finished: list[EngineSequence] = field(default_factory=list)
    preempted: list[EngineSequence] = field(default_factory=list)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSnapshot:
    """State of the engine for its metrics. All but the first three fields count since the start.

    Attributes:
        token_gaps, token_gaps_s: times between two tokens of a sequence: their number and sum.
    """

    waiting: int
    running: int
    kv_usage_ratio: float
    preemptions: int
    prefix_queries_tokens: int
    prefix_hits_tokens: int
    iterations: int
    token_gaps: int
    token_gaps_s: float


class EngineModel:
    """Continuous batching over a paged KV cache; `step_time` times the steps that begin from now on."""

    def __init__(self, settings: EngineModelSettings, step_time: StepTimeModel) -> None:
        self.settings = settings
        self.step_time = step_time
        self._batcher = Batcher(settings)
        self._numbers = itertools.count()
        self._batch: Batch | None = None
        # The uncommitted part of the run: its start and its number of planned iterations.
        self._began_at = 0.0
        self._planned = 0
        self._ends_at: float | None = None
        self._iterations = self._token_gaps = 0
        self._token_gaps_s = 0.0

    def __repr__(self) -> str:
        batcher = self._batcher
        return (
            f"<EngineModel waiting={len(batcher.waiting)} running={len(batcher.running)} kv={batcher.kv!r}>"
        )

    @property
    def ends_at(self) -> float | None:
        """End of the current step; None between steps. `add` and `abort` may make it earlier."""
        return self._ends_at

    @property
    def has_work(self) -> bool:
        """True if any sequence waits or runs."""
        return bool(self._batcher.running) or len(self._batcher.waiting) > 0

    @property
    def decoding(self) -> KeysView[EngineSequence]:
        """Sequences that generate a token per step, in the order in which they joined."""
        return self._batcher.decoding.members()

    def add(self, sequence: EngineSequence, now: float) -> None:
        """Queue a new sequence.

        Raises:
            ValueError: the sequence was added before, or exceeds the context limit.
        """
        sequence.check(self.settings.max_model_len)
        self._cut(now)
        sequence.number = next(self._numbers)
        self._batcher.add(sequence)

    def abort(self, sequence: EngineSequence, now: float) -> bool:
        """Remove a sequence and free its blocks immediately. Return False if it had already ended."""
        self._cut(now)
        return self._batcher.abort(sequence, step_under_way=self._batch is not None)

    def begin_step(self, now: float, *, max_steps: int = 1) -> float | None:
        """Begin a step, or a run of at most `max_steps` steps. Return its end, or None if idle."""
        if self._batch is not None:
            raise RuntimeError(f"a step is in progress until {self._ends_at}: end it first")
        if not self.has_work:
            return None
        preempted: list[EngineSequence] = []
        batch = self._batcher.next_batch()
        # Each running sequence may have been preempted for another that was then preempted as well. The next
        # attempt admits from the queue.
        while batch.is_empty and batch.preempted:
            preempted += batch.preempted
            batch = self._batcher.next_batch()
        if batch.is_empty:
            raise RuntimeError(f"no waiting sequence fits into an empty engine: {self!r}")
        if preempted:
            batch.preempted[:0] = preempted
        for sequence in batch.admitted:
            if sequence.scheduled_at is None:
                sequence.scheduled_at = now
        self._batch = batch
        self._began_at = now
        self._planned = self._run_length(batch, max_steps)
        self._ends_at = now + self._elapsed_s(self._planned)
        return self._ends_at

    def end_step(self) -> StepOutcome:
        """Complete the step at `ends_at`."""
        batch, ended_at = self._batch, self._ends_at
        if batch is None or ended_at is None:
            raise RuntimeError("no step is in progress: begin one first")
        self._commit(self._planned - 1)
        self._count(1)
        self._batch = self._ends_at = None
        first_tokens, finished = self._batcher.complete(batch)
        for sequence in first_tokens:
            sequence.first_token_at = ended_at
        for sequence in finished:
            sequence.finished_at = ended_at
        return StepOutcome(
            ended_at, batch.prefill_tokens, batch.sequences, first_tokens, finished, batch.preempted
        )

    def cached_blocks(self, block_hashes: Sequence[int]) -> int:
        """Return the number of leading blocks that are in the prefix cache."""
        self._batcher.name_answers()
        return len(self._batcher.kv.find(block_hashes, len(block_hashes)))

    def output_tokens(self, sequence: EngineSequence) -> int:
        """Return the tokens that a sequence has generated so far."""
        if sequence.state is SequenceState.DECODING:
            return self._batcher.decoding.output_tokens(sequence, step_under_way=self._batch is not None)
        return sequence.output_tokens

    def snapshot(self, now: float) -> ModelSnapshot:
        """Return the counts at `now`, which must lie within the current step if there is one."""
        self._settle(now)
        batcher = self._batcher
        return ModelSnapshot(
            waiting=len(batcher.waiting),
            running=len(batcher.running),
            kv_usage_ratio=1.0 - batcher.kv.free / batcher.kv.total,
            preemptions=batcher.preemptions,
            prefix_queries_tokens=batcher.prefix_queries_tokens,
            prefix_hits_tokens=batcher.prefix_hits_tokens,
            iterations=self._iterations,
            token_gaps=self._token_gaps,
            token_gaps_s=self._token_gaps_s,
        )

    # -- runs of equal iterations -------------------------------------------------------------------------

    def _run_length(self, batch: Batch, max_steps: int) -> int:
        """Return the number of iterations until the batch may change.

        Nothing is admitted earlier: waiting sequences did not fit, and the number of free blocks only
        decreases until a sequence ends. A head that an eviction may admit limits the run to blank blocks.
        """
        if max_steps <= 1 or batch.prefilling or batch.preempted or batch.has_skipped:
            return 1
        decoding, kv = self._batcher.decoding, self._batcher.kv
        available = kv.blank if batch.awaits_eviction else kv.free
        more = min(max_steps - 1, decoding.steps_to_first_end())
        if more and decoding.blocks_for(more) > available:
            more = decoding.steps_within(available)
        return 1 + more

    def _elapsed_s(self, steps: int) -> float:
        """Return the seconds of the first `steps` uncommitted iterations."""
        batch = self._batch
        assert batch is not None
        if steps == 1:
            return self.step_time.step_s(
                prefill_tokens=batch.prefill_tokens,
                attended_pairs=batch.attended_pairs,
                sequences=batch.sequences,
                context_tokens=batch.context_tokens,
            )
        return self.step_time.decode_run_s(
            steps, sequences=batch.sequences, context_tokens=batch.context_tokens
        )

    def _settle(self, now: float) -> None:
        """Commit the iterations of the run that ended before `now`."""
        if self._planned > 1 and self._batch is not None:
            ended = bisect.bisect_left(range(1, self._planned), now - self._began_at, key=self._elapsed_s)
            self._commit(ended)

    def _cut(self, now: float) -> None:
        """End the run after the iteration in progress at `now`."""
        if self._planned > 1 and self._batch is not None:
            self._settle(now)
            self._planned = 1
            self._ends_at = self._began_at + self._elapsed_s(1)

    def _commit(self, steps: int) -> None:
        """Commit the first `steps` iterations of the run. At least one must remain."""
        batch = self._batch
        if not steps or batch is None:
            return
        self._count(steps)
        self._began_at += self._elapsed_s(steps)
        self._batcher.kv.allocate(self._batcher.decoding.blocks_for(steps))
        self._batcher.decoding.begin_steps(steps)
        batch.context_tokens += steps * batch.sequences
        self._planned -= steps

    def _count(self, steps: int) -> None:
        """Count the next iterations of the run as ended."""
        assert self._batch is not None
        self._iterations += steps
        self._token_gaps += steps * self._batch.sequences
        self._token_gaps_s += self._batch.sequences * self._elapsed_s(steps)
