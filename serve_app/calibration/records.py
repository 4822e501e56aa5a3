"""Rows of `bench --records` as measured requests: what a client saw, in place of the engine's own timestamps.

A client does not see the start of the first step, so the whole TTFT counts as time in the engine, with the
network and the tokenizer. The wait in our own queue is left out where the gateway reported it.
"""

from collections.abc import Mapping
from typing import Any

from serve_app.calibration.measurement import MeasuredRequest, number, whole_number
from serve_app.errors import Outcome


def is_record(row: Mapping[str, Any]) -> bool:
    """Whether a row is a client's record rather than an engine's measurement."""
    return "arrived_at" in row and "outcome" in row


def engine_of(row: Mapping[str, Any]) -> str:
    """The replica that answered, as the gateway named it; empty where the client asked an engine itself."""
    return str(row.get("replica") or "")


def from_record(row: Mapping[str, Any]) -> MeasuredRequest:
    """The request of a record.

    Raises:
        ValueError: it says nothing about the engine's pace; the message is the reason.
    """
    if row["outcome"] != Outcome.COMPLETED:
        raise ValueError("it was not completed")
    if row.get("first_token_at") is None:
        raise ValueError("it has no first token, as without streaming")
    start = next(name for name in ("dispatched_at", "sent_at", "arrived_at") if row.get(name) is not None)
    queued_at = number(row, start)
    return MeasuredRequest(
        prompt_tokens=whole_number(row, "prompt_tokens"),
        output_tokens=whole_number(row, "output_tokens"),
        queued_at=queued_at,
        scheduled_at=queued_at,
        first_token_at=number(row, "first_token_at"),
        last_token_at=number(row, "finished_at"),
    )
