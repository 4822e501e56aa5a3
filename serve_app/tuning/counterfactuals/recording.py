"""Recording: all that a replay of the minutes around one request needs, without any text.

A scheduler creates it from its receipts. Tenants have anonymous names, and prompt hashes are omitted, as in a
capture, so that a recording can be shared. All times are seconds since the recording begins.

An admin can read the receipt of a request of the tenant that a replay omits, and so restore its name
(`with_tenant_name`).
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
    """A recording cannot be read or replayed; the message has the reason."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedRequest:
    """A recorded request.

    Attributes:
        submission: as received from its gateway, with an anonymous tenant and without a prefix.
        client_id: id known to the client.
        arrived_s: arrival; below 0 for requests in progress at the start of the recording.
        expires_after_s: maximum queue time; None for no limit.
        outcome: None while it has not ended.
        usage: as counted by the engine; None if not reported.
        wait_s: time until its last dispatch, or its end in the queue; None while it waits.
        dispatched_s, first_token_s, ended_s: None if it has not happened or is not known.
        pool, replica: target of the last dispatch; empty if there was none.
        expected_prompt_tokens, expected_output_tokens: estimates at arrival or dispatch.
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
        """The gateway's internal id."""
        return self.submission.request_id

    @property
    def prompt_tokens(self) -> int:
        """Prompt tokens as counted, or else as expected."""
        counted = self.usage.prompt_tokens if self.usage is not None else 0
        return counted or max(1, self.expected_prompt_tokens)

    @property
    def ttft_s(self) -> float | None:
        """Time from arrival to the first token; None if the response was not streamed."""
        return None if self.first_token_s is None else self.first_token_s - self.arrived_s


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedChange:
    """A change of the environment during the recording; exactly one field is set.

    Attributes:
        joined: a replica that was added.
        left: a replica that was removed or began to drain.
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
        settings, partition, fleet: state at the start.
        learned: learned state of the scheduler at the start, see `learned_state`.
        changes: in order of time.
        step_times: of the engines by pool, with `latency_s` for the round trip from the scheduler to an
            engine.
        step_times_from: origin of the step times in words; empty if there are none.
        long_prompt_tokens: longer prompts are long prefills.
        earlier_prompt_tokens: lengths of the last requests before the start.
        begins_idle: whether nothing was in progress at the start.
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
    def subject(self) -> RecordedRequest:
        """The request in question."""
        return next(each for each in self.requests if each.request_id == self.request_id)


def encode_recording(recording: Recording) -> str:
    """Encode the recording as JSON. Infinite values are `Infinity`, as Python writes them."""
    return json.dumps(msgspec.to_builtins(recording), separators=(",", ":"))


def decode_recording(text: str | bytes) -> Recording:
    """Decode the output of `encode_recording`.

    Raises:
        RecordingError: it is from another release, or not a recording.
    """
    try:
        content = json.loads(text)
        version = content.get("version") if isinstance(content, dict) else None
        if version != VERSION:
            raise RecordingError(
                f"this release replays recordings of version {VERSION}, but got {version}: use the "
                "release of the application"
            )
        recording = msgspec.convert(content, Recording)
    except (ValueError, msgspec.ValidationError) as error:
        raise RecordingError(f"this is not a recording: {error}") from error
    if all(each.request_id != recording.request_id for each in recording.requests):
        raise RecordingError(
            f"the recording does not contain the request {recording.request_id!r} that it was made for"
        )
    return recording


def example_of_tenant(result: Mapping[str, Any]) -> str:
    """Return the id of a request whose receipt has the omitted tenant's name; empty if none was omitted."""
    return next((each["example"] for each in result["changes"] if each["kind"] == "tenant"), "")


def with_tenant_name(result: Mapping[str, Any], tenant: str) -> dict[str, Any]:
    """Return the result of `what_if` with the tenant's real name in place of the anonymous one."""
    alias = next(each["value"] for each in result["changes"] if each["kind"] == "tenant")

    def label(text: str) -> str:
        return f"{text.removesuffix(alias)}{tenant}" if text.endswith(f" {alias}") else text

    changes = [
        {
            **each,
            "label": label(each["label"]),
            "value": tenant if each["kind"] == "tenant" else each["value"],
        }
        for each in result["changes"]
    ]
    return {**result, "changes": changes, "best": label(result["best"])}
