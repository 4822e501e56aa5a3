"""Versions of the control channel's protocol, and what is said differently to a peer of the one before.

`VERSION` rises whenever a message changes its shape or its meaning. Every process speaks two versions, its
own and the one before, so the parts of an application may be upgraded one by one, in any order:

- The scheduler's endpoint names the version that it speaks, `Hello` the one that the peer has chosen: the
  highest that both know. A connection keeps it to its end.
- *What is received* needs no translation, because messages only grow: new fields come last and have a
  default, which means "as before". Unknown fields are skipped by older readers.
- *What is sent* to a peer of the version before is put as that version knew it: `_AS_BEFORE` says how, for
  each message that it would not understand. A new kind of message is left out, so nothing may depend on it.

When `VERSION` rises, the entries of `_AS_BEFORE` make way for those of the new step, and the records of the
former version in the tests for new ones.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import msgspec

from serve_app.errors import ChannelError, Outcome
from serve_app.scheduling.events import DispatchFailure
from serve_app.serving.channel.messages import (
    OLDEST_VERSION,
    VERSION,
    Finish,
    GatewayPage,
    Message,
    Outlooks,
    PageRequest,
    PutBack,
    Refused,
    Submit,
    Watch,
)

# Reasons of a put-back that version 5 knew.
_FAILURES_BEFORE = frozenset(("unreachable", "lost", "busy", "too_long"))
_OUTCOMES_BEFORE = frozenset(
    (
        "rejected_invalid",
        "rejected_unauthorised",
        "rejected_unknown_model",
        "rejected_body_too_large",
        "rejected_too_long",
        "rejected_queue_full",
        "rejected_deadline_unmeetable",
        "rejected_rate_limited",
        "rejected_no_replica",
        "rejected_stopping",
        "expired",
        "cancelled",
        "failed",
        "completed",
    )
)


def common_version(theirs: int) -> int:
    """The version to speak with a scheduler whose own is `theirs`.

    Raises:
        ChannelError: there is none.
    """
    if theirs < OLDEST_VERSION:
        raise ChannelError(
            f"the scheduler speaks version {theirs} of the protocol, this peer {OLDEST_VERSION} and "
            f"{VERSION}: upgrade by one version at a time"
        )
    return min(theirs, VERSION)


def as_before(message: Message) -> Message | None:
    """The message as the version before knew it; None where it had none for that."""
    change = _AS_BEFORE.get(type(message))
    return message if change is None else change(message)


def _put_back(message: PutBack) -> PutBack:
    if message.failure in _FAILURES_BEFORE:
        return message
    # The only one that counted as an attempt.
    return msgspec.structs.replace(message, failure=DispatchFailure.LOST)


def _submit(message: Submit) -> Submit:
    if message.put_back is None:
        return message
    return msgspec.structs.replace(message, put_back=_put_back(message.put_back))


def _refused(message: Refused) -> Refused:
    if message.conclusion.outcome in _OUTCOMES_BEFORE:
        return message
    conclusion = replace(message.conclusion, outcome=_outcome(message.conclusion.outcome))
    return msgspec.structs.replace(message, conclusion=conclusion)


def _finish(message: Finish) -> Finish:
    if message.outcome in _OUTCOMES_BEFORE:
        return message
    return msgspec.structs.replace(message, outcome=_outcome(message.outcome))


def _outcome(outcome: Outcome) -> Outcome:
    # What refuses a request today without being known then is a limit: 429, and `Retry-After` stays.
    return Outcome.REJECTED_QUEUE_FULL if outcome.startswith("rejected_") else Outcome.FAILED


def _nothing(_message: Message) -> None:
    """Peers of version 5 do not know this message."""


_AS_BEFORE: Mapping[type[Message], Callable[[Any], Message | None]] = {
    PutBack: _put_back,
    Submit: _submit,
    Finish: _finish,
    Refused: _refused,
    GatewayPage: _nothing,
    PageRequest: _nothing,
    Watch: _nothing,
    Outlooks: _nothing,
}
