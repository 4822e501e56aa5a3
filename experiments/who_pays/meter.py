"""An engine model that divides each of its steps among its sequences: what the scheduler cannot see.

The rule follows the step-time model. The weights are read once for all, so the reading is divided equally
among the sequences of a step. What computing takes beyond that goes to the prompts that are computed, by
their tokens. What a sequence adds for itself, by its context or its pairs, is its own.
"""

from collections import defaultdict
from collections.abc import Mapping

from serve_app.engine_model.model import EngineModel, StepOutcome
from serve_app.engine_model.sequences import EngineSequence


class MeteredEngineModel(EngineModel):
    """The same engine, step by step.

    Attributes:
        used_s: seconds by sequence id.
    """

    def __init__(self, model: EngineModel) -> None:
        super().__init__(model.settings, model.step_time)
        self.used_s: dict[str, float] = defaultdict(float)
        self._parts: Mapping[str, float] = {}

    def begin_step(self, now: float, *, max_steps: int = 1) -> float | None:
        """Begin one step, and note what each sequence has of it; runs of steps are not combined."""
        del max_steps
        computed = {sequence: sequence.computed_tokens for sequence in self._batcher.running}
        decoding = {sequence: self._context_of(sequence) for sequence in self.decoding}
        ends_at = super().begin_step(now)
        if ends_at is not None and self._batch is not None:
            chunks = {
                each: each.computed_tokens - computed.get(each, each.cached_tokens)
                for each in self._batch.prefilling
            }
            self._parts = self._divided(chunks, {s: c for s, c in decoding.items() if s in self.decoding})
        return ends_at

    def end_step(self) -> StepOutcome:
        """Complete the step, and charge its time."""
        outcome = super().end_step()
        total = sum(self._parts.values())
        for name, part in self._parts.items():
            self.used_s[name] += outcome.duration_s * part / total
        return outcome

    def _context_of(self, sequence: EngineSequence) -> int:
        return sequence.prompt_tokens + self.output_tokens(sequence)

    def _divided(
        self, chunks: Mapping[EngineSequence, int], contexts: Mapping[EngineSequence, int]
    ) -> dict[str, float]:
        time = self.step_time
        read_s = time.decode_base_s if contexts else 0.0
        if chunks:
            read_s = max(read_s, time.prefill_base_s)
        compute_s = sum(chunks.values()) * time.prefill_per_token_s + len(contexts) * time.decode_compute_s
        excess_s = max(0.0, compute_s - read_s)
        each_s = read_s / (len(chunks) + len(contexts))
        parts: dict[str, float] = {}
        for sequence, tokens in chunks.items():
            # Its pairs: each of its tokens attends to all before it.
            pairs = tokens * (sequence.computed_tokens - tokens) + tokens * (tokens + 1) // 2
            of_excess = excess_s * tokens / sum(chunks.values())
            parts[sequence.sequence_id] = each_s + of_excess + pairs * time.prefill_per_pair_s
        for sequence, context in contexts.items():
            own_s = time.decode_per_sequence_s + context * time.decode_per_context_token_s
            parts[sequence.sequence_id] = each_s + own_s
        return parts
