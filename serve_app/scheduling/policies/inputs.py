"""What a policy is given when it is made."""

from dataclasses import dataclass, field

from serve_app.routing.prefill_cost import PrefillCost, PrefillCostSettings
from serve_app.scheduling.policies.settings import EwsjfSettings
from serve_app.scheduling.request import ScheduledRequest


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyInputs:
    """The learned costs of the model, shared with the scheduler, and the settings of the learned policies."""

    prefill_cost: PrefillCost = field(default_factory=lambda: PrefillCost(PrefillCostSettings()))
    ewsjf: EwsjfSettings = field(default_factory=EwsjfSettings)


def prompt_tokens(scheduled: ScheduledRequest) -> int:
    """Length of a request's prompt as all policies see it: what is expected to be left to compute of it."""
    return scheduled.prefill_tokens
