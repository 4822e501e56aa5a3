"""The work of waiting requests, in sums."""

from dataclasses import dataclass

from serve_app.routing.estimation.estimate import TokenEstimate


@dataclass(slots=True)
class WaitingWork:
    """The work of some waiting requests.

    Attributes:
        tokens: expected tokens of prompts and outputs.
        prompt_tokens: of that, the prompts.
        least_output_tokens: what they generate at least, see `TokenEstimate`.
    """

    requests: int = 0
    tokens: int = 0
    prompt_tokens: int = 0
    least_output_tokens: int = 0

    def add(self, estimate: TokenEstimate, by: int = 1) -> None:
        """Add the work of one request, or take it out (`by` of -1)."""
        self.requests += by
        self.tokens += by * estimate.expected_tokens
        self.prompt_tokens += by * estimate.expected_prompt_tokens
        self.least_output_tokens += by * estimate.least_output_tokens

    def merge(self, other: "WaitingWork") -> None:
        """Add the work of others."""
        self.requests += other.requests
        self.tokens += other.tokens
        self.prompt_tokens += other.prompt_tokens
        self.least_output_tokens += other.least_output_tokens
