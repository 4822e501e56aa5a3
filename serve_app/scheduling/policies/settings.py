"""Settings of EWSJF: the score's weights and the life of queues."""

from dataclasses import asdict, field, fields
from typing import Annotated

from serve_app.settings_base import INTERNAL, NOT_NEGATIVE, POSITIVE, at_least, settings, share_below


@settings(block="ewsjf.weights")
class ScoreWeights:
    """Weights of the density-weighted score, Eq 1 and Eq 4; names as in the paper.

    `w_urg(b) = a_u * b + b_u` weighs waiting, `w_fair(b) = a_f * b + b_f` weighs length, b being the mean
    length of the queue. Both are clamped to `floor`, or long queues could end up with a negative urgency.
    """

    w_base: Annotated[float, NOT_NEGATIVE] = 1.0
    a_u: float = 1e-4
    b_u: float = 1.0
    a_f: float = -5e-5
    b_f: float = 0.5
    floor: Annotated[float, POSITIVE] = 1e-3


PAPER_WEIGHTS = ScoreWeights()

OWN_WEIGHTS = ScoreWeights(a_u=0.0, b_u=0.1)
"""Ours. With the paper's weights a request that has waited a hundred times its own prefill outscores a fresh
request of a tenth of its length. After a burst that holds for all long ones, which then delay the short ones.
The bound on waiting is not the score's task: `promotion` sets it. `experiments/policies` compares both."""


@settings
class GivenWeights:
    """Weights that were set; the policy uses its own for those that are None."""

    # Constant term of the score.
    w_base: Annotated[float | None, INTERNAL] = None
    # The part of the weight of waiting that grows with the mean length of the queue, per token.
    a_u: float | None = None
    # The part of the weight of waiting that is the same for all queues.
    b_u: float | None = None
    # The part of the weight of length that grows with the mean length of the queue, per token.
    a_f: float | None = None
    # The part of the weight of length that is the same for all queues.
    b_f: float | None = None
    # Lower bound of both weights.
    floor: Annotated[float | None, INTERNAL] = None

    def __post_init__(self) -> None:
        self.over(PAPER_WEIGHTS)

    @classmethod
    def all_of(cls, weights: ScoreWeights) -> "GivenWeights":
        """Every weight set explicitly."""
        return cls(**asdict(weights))

    def over(self, others: ScoreWeights) -> ScoreWeights:
        """These weights, and `others` where one is None."""
        given = {each.name: getattr(self, each.name) for each in fields(self)}
        return ScoreWeights(
            **{name: getattr(others, name) if value is None else value for name, value in given.items()}
        )


@settings(block="ewsjf")
class EwsjfSettings:
    """How the EWSJF policies queue and score."""

    # By default the paper's policy has the paper's weights, and ours ages less (`OWN_WEIGHTS`).
    weights: GivenWeights = field(default_factory=GivenWeights)
    # How far beyond a queue's bounds a length still belongs to it (Algorithm 2): 1.10 and 0.90 in the paper.
    tolerance_ratio: Annotated[float, share_below(1), INTERNAL] = 0.10
    # Width of a bubble queue when the queue below it has none to copy.
    bubble_width_tokens: Annotated[int, at_least(1), INTERNAL] = 512
    # Rounds that a bubble may stay empty before it is removed; 20, 30 and 50 are in use.
    bubble_rounds: Annotated[int, at_least(1), INTERNAL] = 30
