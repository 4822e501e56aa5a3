"""What one step of the engine computes."""

from dataclasses import dataclass, field

from serve_app.engine_model.sequences import EngineSequence


@dataclass(slots=True)
class Batch:
    """What one step computes.

    Attributes:
        budget_left: tokens that could still be computed in it.
        prefilling: sequences with a chunk of their prompt in it.
        prefill_tokens: tokens of those chunks together.
        attended_pairs: pairs of such a token and a token that it attends to.
        sequences: decoding sequences in it.
        context_tokens: the sum of their contexts.
        admitted: sequences that came from the waiting queue.
        preempted: sequences that lost their place while it was put together.
        sat_out: whether a decoding sequence is left out for want of budget.
    """

    budget_left: int
    prefilling: list[EngineSequence] = field(default_factory=list)
    prefill_tokens: int = 0
    attended_pairs: int = 0
    sequences: int = 0
    context_tokens: int = 0
    admitted: list[EngineSequence] = field(default_factory=list)
    preempted: list[EngineSequence] = field(default_factory=list)
    sat_out: bool = False

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing to compute."""
        return not self.sequences and not self.prefill_tokens
