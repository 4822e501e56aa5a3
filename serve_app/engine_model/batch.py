"""One step of the engine: the tokens that it computes."""

from dataclasses import dataclass, field

from serve_app.engine_model.sequences import EngineSequence


@dataclass(slots=True)
class Batch:
    """The content of one step.

    Attributes:
        budget_left: tokens that the step could still compute.
        prefilling: sequences with a chunk of their prompt in the step.
        prefill_tokens: tokens of those chunks, in all.
        attended_pairs: pairs of a prompt token and a token that it attends to.
        sequences: decoding sequences in the step.
        context_tokens: the sum of their contexts.
        admitted: sequences admitted from the waiting queue.
        preempted: sequences that were preempted while the step was scheduled.
        has_skipped: whether the budget left out a decoding sequence.
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

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing to compute."""
        return not self.sequences and not self.prefill_tokens
