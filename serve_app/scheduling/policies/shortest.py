"""Shortest job first, by prompt length, with and without ageing, and the oracle that knows output lengths.

Question: whose service is shortest? Inputs: prompt length; with ageing also the time of arrival; for the
oracle the true output length, which a simulation hands over as `max_output_tokens`. Ties: the order of
arrival. `sjf` and `oracle` starve long requests without bound; ageing bounds it: a request gains `rate`
tokens for each second that it waits. Source: textbook; the usual remedy.
"""

import math

from serve_app.scheduling.policies.inputs import PolicyInputs, prompt_tokens
from serve_app.scheduling.policies.protocol import OrderingPolicy
from serve_app.scheduling.request import Entry

# A 4,096-token prompt draws level with a fresh short one after about 20 s.
_AGEING_TOKENS_PER_S = 200.0
# A decoded token occupies an engine for about as long as some dozens of prefilled ones.
_PREFILL_TOKENS_PER_OUTPUT_TOKEN = 10.0


class Sjf(OrderingPolicy):
    """The shortest prompt first."""

    def key(self, entry: Entry) -> float:
        """The prompt's length."""
        return float(prompt_tokens(entry))

    def score(self, head: Entry, now: float) -> float:
        """The shorter the more urgent."""
        return -self.key(head)


class SjfAging(Sjf):
    """The shortest prompt first, less what it has waited."""

    def key(self, entry: Entry) -> float:
        """Length minus gain by waiting; all gain alike, so the order by this key never changes."""
        return prompt_tokens(entry) + _AGEING_TOKENS_PER_S * entry.request.arrived_at


class Oracle(Sjf):
    """The least total work first, output included. Not deployable: nobody knows it."""

    def key(self, entry: Entry) -> float:
        """Prefill and decode in units of prefilled tokens."""
        output_tokens = entry.request.max_output_tokens or 0
        return prompt_tokens(entry) + _PREFILL_TOKENS_PER_OUTPUT_TOKEN * output_tokens


class Hrrn(OrderingPolicy):
    """Highest response ratio next: `(waited + prefill) / prefill`. Starves nobody, as waiting counts.

    The ratio's order changes with time, so requests wait in queues of nearly equal length (2 % apart), in the
    order of arrival.
    """

    def __init__(self, inputs: PolicyInputs) -> None:
        self._prefill_cost = inputs.prefill_cost

    def queue_of(self, entry: Entry) -> str:
        """By length, in steps of a thirty-second of an octave."""
        return str(int(32 * math.log2(prompt_tokens(entry))))

    def score(self, head: Entry, now: float) -> float:
        """The response ratio."""
        return (now - head.request.arrived_at) / self._prefill_cost.seconds(prompt_tokens(head))
