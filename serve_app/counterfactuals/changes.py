"""What may be different: each change makes another recording of one, and changes nothing else."""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace

from serve_app.counterfactuals.recording import RecordedRequest, Recording
from serve_app.counterfactuals.replay import is_played
from serve_app.request import PriorityClass

POLICIES_ASKED = ("ewsjf", "fcfs", "sjf", "hrrn", "wspt-drr", "two-queue")
"""Of `scheduling.policies`, those that are no variant of another one."""

POLICY = "policy"
"""The kind of a change to another policy."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ChangedRecording:
    """A recording in which one thing is different.

    Attributes:
        kind: class, replica, policy, long_prefills, tenant or own_requests.
        value: what of that kind: the class, the pool, the policy or the tenant.
        label: in words, for a person.
        left_out: client ids of the requests that are left out.
        example: the scheduler's own id of one of them; empty where none is.
    """

    kind: str
    value: str
    label: str
    recording: Recording
    left_out: tuple[str, ...] = ()
    example: str = ""


def all_changes(recording: Recording) -> Iterator[ChangedRecording]:
    """Every change that makes sense for the request."""
    for priority in PriorityClass:
        if priority is not recording.asked.submission.priority:
            yield with_class(recording, priority)
    if recording.fleet:
        yield with_replica(recording)
    for policy in POLICIES_ASKED:
        if policy != recording.settings.policy:
            yield with_policy(recording, policy)
    yield from _without_others(recording)


def with_class(recording: Recording, priority: PriorityClass) -> ChangedRecording:
    """The request has another class, and may wait as long as that class may."""
    asked = recording.asked
    submission = replace(asked.submission, priority=priority)
    expires_after_s = asked.expires_after_s
    if submission.queue_timeout_s is None:
        expires_after_s = recording.settings.queue_timeout_s.of(priority)
    changed = replace(asked, submission=submission, expires_after_s=expires_after_s)
    requests = tuple(changed if each is asked else each for each in recording.requests)
    return ChangedRecording(
        kind="class",
        value=priority.value,
        label=f"as {priority.value}",
        recording=replace(recording, requests=requests),
    )


def with_replica(recording: Recording) -> ChangedRecording:
    """One replica more from the beginning on, in the pool that served the request."""
    pool = pool_of(recording)
    alike = next((each for each in recording.fleet if each.pool == pool), recording.fleet[0])
    more = replace(alike, replica_id=f"{alike.pool}+1")
    return ChangedRecording(
        kind="replica",
        value=alike.pool,
        label=f"one replica more in pool {alike.pool}",
        recording=replace(recording, fleet=(*recording.fleet, more)),
    )


def with_policy(recording: Recording, policy: str) -> ChangedRecording:
    """Another policy orders all requests."""
    settings = replace(recording.settings, policy=policy)
    return ChangedRecording(
        kind=POLICY, value=policy, label=f"policy {policy}", recording=replace(recording, settings=settings)
    )


def pool_of(recording: Recording) -> str:
    """The pool that served the request; where none did, that of most requests."""
    if recording.asked.pool:
        return recording.asked.pool
    pools = Counter(each.pool for each in recording.requests if each.pool)
    return pools.most_common(1)[0][0] if pools else recording.fleet[0].pool


def _without_others(recording: Recording) -> Iterator[ChangedRecording]:
    asked = recording.asked
    beside = [
        each for each in recording.requests if each is not asked and is_played(each) and overlaps(each, asked)
    ]
    long = [each for each in beside if each.prompt_tokens > recording.long_prompt_tokens]
    if long:
        yield without(
            recording, long, "long_prefills", f"without {_counted(len(long), 'long prefill')} beside it"
        )
    tenant = asked.submission.tenant
    others: Counter[str] = Counter()
    for each in beside:
        if each.submission.tenant != tenant:
            others[each.submission.tenant] += each.prompt_tokens + each.expected_output_tokens
    if others:
        most = others.most_common(1)[0][0]
        theirs = [each for each in beside if each.submission.tenant == most]
        yield without(
            recording, theirs, "tenant", f"without {_counted(len(theirs), 'request')} of tenant {most}"
        )
        own = [each for each in beside if each.submission.tenant == tenant]
        if own:
            yield without(
                recording, own, "own_requests", f"without {_counted(len(own), 'other request')} of its tenant"
            )


def _counted(count: int, one: str) -> str:
    return f"the {one}" if count == 1 else f"the {count:,} {one}s"


def without(recording: Recording, others: list[RecordedRequest], kind: str, label: str) -> ChangedRecording:
    """Some requests never came."""
    gone = {each.request_id for each in others}
    kept = tuple(each for each in recording.requests if each.request_id not in gone)
    return ChangedRecording(
        kind=kind,
        value=others[0].submission.tenant if kind == "tenant" else "",
        label=label,
        recording=replace(recording, requests=kept),
        left_out=tuple(each.client_id for each in others),
        example=others[0].request_id,
    )


def overlaps(other: RecordedRequest, asked: RecordedRequest) -> bool:
    """Whether the other waited or ran while the request waited."""
    until = asked.arrived_s + (asked.wait_s or 0.0)
    return other.arrived_s < until and (other.ended_s is None or other.ended_s > asked.arrived_s)
