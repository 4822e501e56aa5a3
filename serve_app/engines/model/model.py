"""Engine model: an LLM engine as a pure state machine on a clock that the caller owns.

There are two drivers: the emulated engine sleeps until a step ends, the simulator schedules an event. Both
run a step like this:

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
"""

import bisect
import itertools
from collections.abc import KeysView, Sequence
from dataclasses import dataclass, field

from serve_app.engines.model.batching import Batch, Batcher
from serve_app.engines.model.sequences import EngineModelSettings, EngineSequence, SequenceState
from serve_app.engines.model.step_time import StepTimeModel


# Not frozen, because creating a frozen object takes three times as long and there is one per step.
@dataclass(slots=True)
class StepOutcome:
    """Outcome of a step, or of a run of steps. `finished` sequences carry their times and counts.

    Attributes:
        ended_at: seconds on the model's clock.
        duration_s: seconds of the last iteration.
        iterations: 1, or the length of the run's last uncommitted part.
        prefill_tokens: prompt tokens computed.
        sequences: decoding sequences in each iteration.
        first_tokens: sequences that generated their first token.
        finished: sequences that generated their last token.
        preempted: sequences that were preempted when the step began.
    """

    ended_at: float
    duration_s: float
    iterations: int
    prefill_tokens: int
    sequences: int
    first_tokens: list[EngineSequence] = field(default_factory=list)
    finished: list[EngineSequence] = field(default_factory=list)
    preempted: list[EngineSequence] = field(default_factory=list)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSnapshot:
    """State of the engine for its metrics. The last four fields count since the start."""

    waiting: int
    running: int
    kv_usage_ratio: float
    preemptions: int
    prefix_queries_tokens: int
    prefix_hits_tokens: int
    iterations: int


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
        self._iterations = 0

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
        if sequence.state is not SequenceState.NEW:
            raise ValueError(
                f"sequence {sequence.sequence_id} is {sequence.state.value}, it cannot be added again"
            )
        total = sequence.prompt_tokens + sequence.target_tokens
        if sequence.prompt_tokens < 1 or sequence.target_tokens < 0 or total > self.settings.max_model_len:
            raise ValueError(
                f"sequence of {sequence.prompt_tokens} + {sequence.target_tokens} tokens: the prompt needs "
                f"at least 1, and both together at most max_model_len = {self.settings.max_model_len}"
            )
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
        iterations = self._planned
        self._commit(iterations - 1)
        duration_s = self._elapsed_s(1)
        self._iterations += 1
        self._batch = self._ends_at = None
        first_tokens, finished = self._batcher.complete(batch)
        for sequence in first_tokens:
            sequence.first_token_at = ended_at
        for sequence in finished:
            sequence.finished_at = ended_at
        return StepOutcome(
            ended_at,
            duration_s,
            iterations,
            batch.prefill_tokens,
            batch.sequences,
            first_tokens,
            finished,
            batch.preempted,
        )

    def cached_blocks(self, block_hashes: Sequence[int]) -> int:
        """Return the number of leading blocks that are in the prefix cache."""
        return self._batcher.kv.count_hits(block_hashes, len(block_hashes))

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
        self._began_at += self._elapsed_s(steps)
        self._batcher.kv.allocate(self._batcher.decoding.blocks_for(steps))
        self._batcher.decoding.begin_steps(steps)
        batch.context_tokens += steps * batch.sequences
        self._planned -= steps
        self._iterations += steps
