"""A trace: the requests of a workload in the order of arrival, and their provenance."""

from collections.abc import Mapping
from dataclasses import dataclass

from serve_app.errors import ServeAppError
from serve_app.request import PriorityClass

PREFIX_BLOCK_TOKENS = 512
"""Tokens that one id in `TraceRequest.prefix` stands for; Mooncake's block size."""


class TraceError(ServeAppError):
    """A trace cannot be read or made; the message names it and the remedy."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceRequest:
    """One request of a workload, with the true length of its answer, which no scheduler sees.

    Attributes:
        arrival_s: seconds after the start of the trace.
        output_tokens: the true length of the answer.
        prefix: ids of the prompt's leading blocks of `PREFIX_BLOCK_TOKENS`; equal ids mean equal text.
    """

    arrival_s: float
    prompt_tokens: int
    output_tokens: int
    tenant: str = "default"
    priority: PriorityClass = PriorityClass.DEFAULT
    prefix: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class SkippedRows:
    """Rows of a file without a request: how many, and the line of the first one."""

    count: int
    first: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Trace:
    """Requests by arrival, and their provenance.

    Attributes:
        source: the file, or the figures from which it was generated, with every change made since.
        skipped: rows that could not be read, by reason; None for a generated trace.
        without_file: names of published traces in it whose files are not here, so that their requests are
            generated.
    """

    name: str
    source: str
    requests: tuple[TraceRequest, ...]
    skipped: Mapping[str, SkippedRows] | None = None
    without_file: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if not self.requests:
            raise TraceError(f"trace {self.name!r} ({self.source}) holds no request")

    @property
    def span_s(self) -> float:
        """Seconds from the first arrival to the last."""
        return self.requests[-1].arrival_s - self.requests[0].arrival_s

    @property
    def rate_per_s(self) -> float | None:
        """Mean arrival rate, `(n - 1) / span`; None when all arrive at once."""
        return (len(self.requests) - 1) / self.span_s if self.span_s > 0 else None

    @property
    def title(self) -> str:
        """Its name for a caption, which says where generated lengths stand for those of a file."""
        if not self.without_file:
            return self.name
        parts = (
            "" if self.without_file == tuple(self.name.split("+")) else f" of {', '.join(self.without_file)}"
        )
        return f"{self.name} (generated lengths{parts})"

    def provenance(self) -> dict[str, object]:
        """What a result file records about its workload."""
        skipped = {reason: rows.count for reason, rows in (self.skipped or {}).items()}
        return {
            "name": self.name,
            "source": self.source,
            "generated_without_file": list(self.without_file),
            "requests": len(self.requests),
            "rate_per_s": self.rate_per_s,
            "prompt_tokens": sum(request.prompt_tokens for request in self.requests),
            "output_tokens": sum(request.output_tokens for request in self.requests),
            "skipped_rows": skipped,
        }
