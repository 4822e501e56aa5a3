"""Request records for metrics tests."""

from typing import Any

from serve_app.core.metrics.record import RequestRecord
from serve_app.errors import Outcome


def record(**changes: Any) -> RequestRecord:
    """Build a completed request: 1 s wait, first token after 2 s, 11 tokens in 3 s; any field can differ."""
    fields: dict[str, Any] = {
        "request_id": "r1",
        "arrived_at": 10.0,
        "dispatched_at": 11.0,
        "first_token_at": 12.0,
        "finished_at": 13.0,
        "outcome": Outcome.COMPLETED,
        "prompt_tokens": 100,
        "output_tokens": 11,
    }
    return RequestRecord(**{**fields, **changes})
