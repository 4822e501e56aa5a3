"""Files and batches as they are stored and shown.

A batch passes through these states:

    validating -> failed: its input does not fit its endpoint
    validating -> in_progress -> finalizing -> completed
                                            -> expired: its completion window ended
                  in_progress -> cancelling -> finalizing -> cancelled

The shape of the documents is OpenAI's (`FileObject` and `Batch` of its API reference).
"""

import re
import secrets
from typing import Any, Literal

import msgspec

Status = Literal[
    "validating",
    "in_progress",
    "finalizing",
    "cancelling",
    "completed",
    "failed",
    "expired",
    "cancelled",
]
OPEN: tuple[Status, ...] = ("validating", "in_progress", "finalizing", "cancelling")
"""States of batches that have work left."""

LONGEST_WINDOW_S = 24 * 3600
_WINDOW = re.compile(r"([1-9]\d{0,4})([mhd])")
_UNITS_S = {"m": 60, "h": 3600, "d": 24 * 3600}


class FileRecord(msgspec.Struct, kw_only=True, omit_defaults=True):
    """A file.

    Attributes:
        owner: tenant that may use it.
        bytes: its length.
        created_at: seconds since the epoch, as all times here.
        is_complete: whether its contents are written.
        requests: number of requests in an input file.
        first_lines: line of the first request to each endpoint of an input file.
    """

    id: str
    owner: str
    filename: str
    purpose: str
    created_at: int
    bytes: int = 0
    is_complete: bool = False
    expires_at: int | None = None
    requests: int = 0
    first_lines: dict[str, int] = {}

    def shown(self) -> dict[str, Any]:
        """Return OpenAI's `FileObject`."""
        return {
            "id": self.id,
            "object": "file",
            "bytes": self.bytes,
            "created_at": self.created_at,
            "expires_at": self.expires_at,
            "filename": self.filename,
            "purpose": self.purpose,
            "status": "processed" if self.is_complete else "uploaded",
            "status_details": None,
        }


class Tokens(msgspec.Struct):
    """Tokens of the completed requests of a batch."""

    prompt: int = 0
    cached: int = 0
    output: int = 0

    def add(self, other: "Tokens") -> None:
        """Add the tokens of further requests."""
        self.prompt += other.prompt
        self.cached += other.cached
        self.output += other.output


class BatchError(msgspec.Struct):
    """Why a batch failed as a whole."""

    code: str
    message: str
    param: str | None = None
    line: int | None = None


class BatchRecord(msgspec.Struct, kw_only=True, omit_defaults=True):
    """A batch.

    Attributes:
        owner: tenant that may use it, and that its requests belong to.
        key_id: API key that created it; empty if none was needed.
        keep_output_s: time after which its output is deleted.
        reached: time at which it entered each state.
        total: number of its requests.
        completed, failed: requests with an answer, and with an error.
        rate_per_s: requests that end per second, lately.
        is_expired: whether its completion window ended before its requests.
        output_file_id, error_file_id: empty until they are chosen.
    """

    id: str
    owner: str
    key_id: str
    endpoint: str
    input_file_id: str
    completion_window: str
    created_at: int
    expires_at: int
    keep_output_s: int
    status: Status = "validating"
    reached: dict[str, int] = {}
    total: int = 0
    completed: int = 0
    failed: int = 0
    rate_per_s: float = 0.0
    tokens: Tokens = msgspec.field(default_factory=Tokens)
    errors: list[BatchError] = []
    metadata: dict[str, str] | None = None
    is_expired: bool = False
    output_file_id: str = ""
    error_file_id: str = ""

    @property
    def is_open(self) -> bool:
        """Whether it has work left."""
        return self.status in OPEN

    @property
    def remaining(self) -> int:
        """Number of requests that have not ended."""
        return self.total - self.completed - self.failed

    def enter(self, status: Status, now: float) -> None:
        """Enter a state."""
        self.status = status
        self.reached = {**self.reached, status: int(now)}

    def expected_end_at(self, now: float) -> int | None:
        """Return when it is expected to end at its present rate; None if that is not known."""
        if self.status != "in_progress" or self.rate_per_s <= 0:
            return None
        return int(now + self.remaining / self.rate_per_s)

    def shown(self, now: float) -> dict[str, Any]:
        """Return OpenAI's `Batch`, and `expected_end_at`."""
        tokens = self.tokens
        times = {f"{state}_at": self.reached.get(state) for state in (*OPEN[1:], "completed", "failed")}
        times |= {f"{state}_at": self.reached.get(state) for state in ("expired", "cancelled")}
        return {
            "id": self.id,
            "object": "batch",
            "endpoint": self.endpoint,
            "errors": {"object": "list", "data": self.errors} if self.errors else None,
            "input_file_id": self.input_file_id,
            "completion_window": self.completion_window,
            "status": self.status,
            # The files exist once the batch has ended.
            "output_file_id": None if self.is_open else self.output_file_id or None,
            "error_file_id": None if self.is_open else self.error_file_id or None,
            "created_at": self.created_at,
            "expires_at": self.expires_at,
            **times,
            "request_counts": {"total": self.total, "completed": self.completed, "failed": self.failed},
            "usage": {
                "input_tokens": tokens.prompt,
                "input_tokens_details": {"cached_tokens": tokens.cached},
                "output_tokens": tokens.output,
                "output_tokens_details": {"reasoning_tokens": 0},
                "total_tokens": tokens.prompt + tokens.output,
            },
            "metadata": self.metadata,
            "expected_end_at": self.expected_end_at(now),
        }


def new_id(kind: str) -> str:
    """Return a new id, such as `batch_…`, that cannot be guessed."""
    return f"{kind}{secrets.token_hex(16)}"


def window_s(written: str) -> int | None:
    """Return a completion window such as `24h` or `30m` in seconds; None if it is not one."""
    found = _WINDOW.fullmatch(written)
    seconds = int(found[1]) * _UNITS_S[found[2]] if found is not None else 0
    return seconds if 0 < seconds <= LONGEST_WINDOW_S else None
