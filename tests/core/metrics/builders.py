"""Records for the tests of metrics."""

from typing import Any

from serve_app.core.metrics.record import RequestRecord
from serve_app.errors import Outcome


def record(**changes: Any) -> RequestRecord:
    """A completed request: waits 1 s, first token after 2 s, 11 tokens in 3 s; every field can be changed."""
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
