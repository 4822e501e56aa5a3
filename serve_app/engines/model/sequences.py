"""State of the engine model: sequences, the waiting queue, limits, and the paged KV cache as block counts.

Blocks need no identity here. Every block is in exactly one of four states, so `total` is always

    private (held by one sequence) + named and held + cached (named, not held) + blank

`free` is cached + blank. When no blank block is left, the least recently used cached block is evicted. A name
is the content hash of a full block of tokens; sequences with the same name share the block. vLLM's block pool
does the same: blocks without a hash go to the front of its free queue, blocks with one to the back.
"""

import enum
import heapq
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field
from typing import Annotated

from serve_app.core.settings_base import NOT_NEGATIVE, at_least, settings

# A content hash of a full prompt block, or the private name (sequence number, block index) of a preempted
# sequence's block, which stays in the prefix cache until it is evicted.
BlockName = int | tuple[int, int]


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
            of the answer may follow; they are cached at its end.
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
    block_hashes: SequenceOf[int] = ()

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
    named_blocks: list[BlockName] = field(default_factory=list)
    blocks: int = 0
    # Names of the leading full blocks: the prompt's hashes, and private names after a preemption.
    block_names: list[BlockName] = field(default_factory=list)
    # Clocks of `DecodingSet` at which the sequence joined and at which it ends.
    joined_clock: int = 0
    finish_clock: int = 0

    @property
    def tokens_to_compute(self) -> int:
        """Tokens to compute before it can generate: the prompt, and outputs from before a preemption."""
        return self.prompt_tokens + self.output_tokens

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
        blank: blocks that nothing is stored in.
    """

    __slots__ = ("_cached", "_holders", "blank", "total")

    def __init__(self, total: int) -> None:
        if total < 1:
            raise ValueError(f"the KV cache needs at least one block, got {total}")
        self.total = total
        self.blank = total
        self._holders: dict[BlockName, int] = {}
        self._cached: OrderedDict[BlockName, None] = OrderedDict()

    def __repr__(self) -> str:
        named = len(self._holders)
        return f"<KVBlocks total={self.total} free={self.free} cached={len(self._cached)} named={named}>"

    @property
    def free(self) -> int:
        """Blocks that can be allocated now, including cached ones."""
        return self.blank + len(self._cached)

    def count_hits(self, names: Sequence[BlockName], limit: int) -> int:
        """Return the number of leading blocks that are in the cache, at most `limit`."""
        hits = 0
        for name in names[:limit]:
            if name not in self._holders and name not in self._cached:
                break
            hits += 1
        return hits

    def fits(self, blocks: int, hits: Sequence[BlockName] = ()) -> bool:
        """Return whether `blocks` fit if the leading ones, `hits`, are shared from the cache."""
        needed = blocks - sum(1 for name in hits if name in self._holders)
        return needed <= self.free

    def share(self, names: Iterable[BlockName]) -> None:
        """Hold cached blocks that `count_hits` has found."""
        for name in names:
            holders = self._holders.get(name)
            if holders is None:
                del self._cached[name]
                self._holders[name] = 1
            else:
                self._holders[name] = holders + 1

    def allocate(self, blocks: int) -> None:
        """Allocate private blocks. The caller must have checked that they fit."""
        if blocks <= self.blank:
            self.blank -= blocks
            return
        evicted = blocks - self.blank
        if evicted > len(self._cached):
            raise ValueError(f"{blocks} blocks wanted, only {self.free} of {self.total} are free")
        self.blank = 0
        for _ in range(evicted):
            self._cached.popitem(last=False)

    def name(self, block_name: BlockName) -> bool:
        """Name a private block. Return False if the name is in use; the block then remains private."""
        if block_name in self._holders or block_name in self._cached:
            return False
        self._holders[block_name] = 1
        return True

    def release(self, private: int, names: Sequence[BlockName]) -> None:
        """Free private blocks and release named ones, which remain cached if no other sequence holds them."""
        self.blank += private
        # The end of a prefix is useless without its beginning, so it is evicted first.
        for name in reversed(names):
            holders = self._holders[name] - 1
            if holders:
                self._holders[name] = holders
            else:
                del self._holders[name]
                self._cached[name] = None

    def discard(self, names: Iterable[BlockName]) -> None:
        """Turn the cached ones among these blocks into blank blocks."""
        for name in names:
            if name in self._cached:
                del self._cached[name]
                self.blank += 1
