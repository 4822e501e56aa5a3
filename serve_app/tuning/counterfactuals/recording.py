"""The recording: all that a replay of the minutes around one request needs, and no text.

A scheduler draws it up from its receipts. Tenants have names that say nothing, and hashes of prompts are left
out, as in a capture. All times are seconds since the recording begins.

The name of the tenant that is left out in a replay, for those who may know it.

A recording calls tenants by names that say nothing, so that it may be passed on. Who asks a scheduler as an
admin may see the receipt of a request of that tenant, and with it the name.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import msgspec

from serve_app.core import SchedulerSettings
from serve_app.core.policies.length_queues import Partition
from serve_app.core.routing.replica import ReplicaSpec
from serve_app.errors import Outcome, ServeAppError
from serve_app.request import Submission, Usage

VERSION = 1


class RecordingError(ServeAppError):
    """A recording cannot be read or replayed; the message says why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedRequest:
    """One request.

    Attributes:
        submission: as its gateway handed it over, with another tenant's name and no prefix.
        client_id: the id that its client knows.
        arrived_s: below 0 for one that was under way when the recording begins.
        expires_after_s: how long it may wait in the queue; None for ever.
        outcome: None while it is open.
        usage: as the engine counted it; None where it did not say.
        wait_s: until its last dispatch, or its end in the queue; None while it waits.
        dispatched_s, first_token_s, ended_s: None where that has not happened, or is not known.
        pool, replica: where it was sent last; empty when it never was.
        expected_prompt_tokens, expected_output_tokens: as estimated when it arrived, or when it was sent.
    """

    submission: Submission
    client_id: str
    arrived_s: float
    expires_after_s: float | None
    outcome: Outcome | None
    usage: Usage | None
    wait_s: float | None
    dispatched_s: float | None
    first_token_s: float | None
    ended_s: float | None
    pool: str
    replica: str
    expected_prompt_tokens: int
    expected_output_tokens: int

    @property
    def request_id(self) -> str:
        """The gateway's own id."""
        return self.submission.request_id

    @property
    def prompt_tokens(self) -> int:
        """As counted, or else as expected."""
        counted = self.usage.prompt_tokens if self.usage is not None else 0
        return counted or max(1, self.expected_prompt_tokens)

    @property
    def ttft_s(self) -> float | None:
        """From its arrival to its first token; None where its answer was not streamed."""
        return None if self.first_token_s is None else self.first_token_s - self.arrived_s


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedChange:
    """What changed around the requests meanwhile; one field of these is given.

    Attributes:
        joined: a replica came.
        left: a replica went, or began to drain.
    """

    at_s: float
    joined: ReplicaSpec | None = None
    left: str | None = None
    partition: Partition | None = None
    settings: SchedulerSettings | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Recording:
    """The minutes around one request.

    Attributes:
        request_id: which one.
        settings, partition, fleet: in force when it begins.
        learned: what the scheduler had learned then, see `learned_state`.
        changes: in order.
        step_times: of the engines, by pool, with `latency_s` from the scheduler to an engine and back.
        step_times_from: where these come from, in words; empty where there are none.
        long_prompt_tokens: longer prompts are long prefills.
        earlier_prompt_tokens: of the last requests before it begins.
        begins_idle: nothing was under way when it begins.
        requests: by arrival.
    """

    version: int = VERSION
    request_id: str
    settings: SchedulerSettings
    partition: Partition | None
    fleet: tuple[ReplicaSpec, ...]
    learned: Mapping[str, Any]
    changes: tuple[RecordedChange, ...]
    step_times: Mapping[str, Mapping[str, float]]
    step_times_from: str
    long_prompt_tokens: float
    earlier_prompt_tokens: tuple[int, ...]
    begins_idle: bool
    requests: tuple[RecordedRequest, ...]

    @property
    def asked(self) -> RecordedRequest:
        """The request itself."""
        return next(each for each in self.requests if each.request_id == self.request_id)


def encode_recording(recording: Recording) -> str:
    """The document as JSON; infinite figures are `Infinity`, as Python writes them."""
    return json.dumps(msgspec.to_builtins(recording), separators=(",", ":"))


def decode_recording(text: str | bytes) -> Recording:
    """What `encode_recording` wrote.

    Raises:
        RecordingError: it is of another release, or no recording.
    """
    try:
        content = json.loads(text)
        version = content.get("version") if isinstance(content, dict) else None
        if version != VERSION:
            raise RecordingError(
                f"this release replays recordings of version {VERSION}, and got {version}: ask with the "
                "release that serves"
            )
        recording = msgspec.convert(content, Recording)
    except (ValueError, msgspec.ValidationError) as error:
        raise RecordingError(f"this is no recording: {error}") from error
    if all(each.request_id != recording.request_id for each in recording.requests):
        raise RecordingError(
            f"the recording does not hold the request {recording.request_id!r} that it is about"
        )
    return recording


def request_of_tenant(told: Mapping[str, Any]) -> str:
    """The id of a request by whose receipt the tenant can be named; empty where no tenant was left out."""
    return next((each["example"] for each in told["changes"] if each["kind"] == "tenant"), "")


def named(told: Mapping[str, Any], tenant: str) -> dict[str, Any]:
    """What `what_if` has told, with the tenant's name in place of the one that says nothing."""
    alias = next(each["value"] for each in told["changes"] if each["kind"] == "tenant")

    def label(text: str) -> str:
        return f"{text.removesuffix(alias)}{tenant}" if text.endswith(f" {alias}") else text

    changes = [
        {
            **each,
            "label": label(each["label"]),
            "value": tenant if each["kind"] == "tenant" else each["value"],
        }
        for each in told["changes"]
    ]
    return {**told, "changes": changes, "best": label(told["best"])}
