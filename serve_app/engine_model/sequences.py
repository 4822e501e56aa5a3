"""A sequence in the engine model: its request and its progress."""

import enum
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field

# A content hash of a full prompt block, or the private name (sequence number, block index) under which the
# blocks of a preempted sequence stay in the prefix cache until they are evicted.
BlockName = int | tuple[int, int]


class SequenceState(enum.Enum):
    """The state of a sequence in the engine."""

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
        arrived_at: when it reached the engine, in seconds on the model's clock.
        priority: lower values are scheduled first; used only under the priority policy.
        block_hashes: content hashes of the prompt's full blocks, for the prefix cache; may be empty.
        output_tokens: tokens generated so far; while it decodes, read `EngineModel.output_tokens`.
        computed_tokens: tokens whose KV entries exist; maintained while it is not decoding.
        cached_tokens: prompt tokens that the prefix cache supplied when it was first scheduled.
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
    # Blocks held: those under a name in the prefix cache, and all of them (named and private).
    named_blocks: list[BlockName] = field(default_factory=list)
    blocks: int = 0
    # Names of its leading full blocks: the prompt's hashes, and private names after a preemption.
    block_names: list[BlockName] = field(default_factory=list)
    # While decoding: on the clock of `DecodingSet`, when it joined and when it ends.
    joined_clock: int = 0
    finish_clock: int = 0

    @property
    def known_tokens(self) -> int:
        """Tokens to compute before it can generate: the prompt, and outputs from before a preemption."""
        return self.prompt_tokens + self.output_tokens

    @property
    def urgency(self) -> tuple[int, float, int]:
        """Sort key under the priority policy: lower value first, then arrival."""
        return (self.priority, self.arrived_at, self.number)
