"""The oracle: the least total work first, with output lengths that nobody can know in production.

Question: whose service is shortest, output included? Inputs: prompt length and the true output length, which
a simulation discloses as `max_output_tokens`. Ties: the order of arrival. Starves long requests without
bound.
"""

from serve_app.scheduling.policies.sjf import Sjf
from serve_app.scheduling.request import ScheduledRequest

# A decoded token occupies an engine for about as long as some dozens of prefilled ones.
_PREFILL_TOKENS_PER_OUTPUT_TOKEN = 10.0


class Oracle(Sjf):
    """The least total work first, output included. Not deployable: in production nobody knows it."""

    def key(self, scheduled: ScheduledRequest) -> float:
        """Prefill and decode in units of prefilled tokens."""
        output_tokens = scheduled.request.spec.max_output_tokens or 0
        return scheduled.prefill_tokens + _PREFILL_TOKENS_PER_OUTPUT_TOKEN * output_tokens
