"""Draws up the recording of the minutes around one request, for a replay (`counterfactuals.recording`).

The minutes begin with the busy period: the first arrival since which the model has always had something to
do. Where that is long ago they begin later, and the requests that were under way then have arrived before.
They end with the busy period, or a while after the request.
"""

from collections.abc import Generator, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from serve_app.counterfactuals.recording import RecordedChange, RecordedRequest, Recording
from serve_app.engine_model.step_time import StepTimeModel
from serve_app.rate_limits import KeyTerms
from serve_app.request import Request, Submission
from serve_app.scheduling import Scheduler, SchedulerSettings
from serve_app.serving.scheduler.receipts.book import ReceiptBook
from serve_app.serving.scheduler.receipts.capture import pseudonym
from serve_app.serving.scheduler.receipts.receipt import AskedRequest, Attempt, Receipt
from serve_app.serving.scheduler.receipts.surroundings import RecordedSurroundings

LEAD_S = 180.0
"""How long before the request the minutes begin at the earliest."""
MOST_BEFORE, MOST_AFTER = 3_000, 1_000
"""Requests that arrive before the one in question, and after it: there are many replays of them."""
_AFTERWARDS_S = 30.0
_EARLIER = 500
_LATENCY_S = 0.002
# Requests in one part of the work: a few milliseconds.
_SORTED, _DESCRIBED = 5_000, 250


@dataclass(frozen=True, slots=True)
class StepTimes:
    """How fast the engines are, as far as the application knows, as in a recording."""

    by_pool: Mapping[str, Mapping[str, float]]
    source: str


def known_step_times(tuner: Mapping[str, Any], profiles: Mapping[str, StepTimeModel]) -> StepTimes:
    """Those that a tuner has fitted, or else those of profiles.

    Args:
        tuner: what the tuner tells of itself.
    """
    twin = tuner.get("twin") or {}
    if twin.get("engines"):
        return StepTimes(twin["engines"], "fitted by the tuner")
    # To the engine and back, as simulations assume it.
    told = {pool: {"latency_s": _LATENCY_S, **asdict(each)} for pool, each in profiles.items()}
    return StepTimes(told, "those of the profile" if told else "")


@dataclass(frozen=True, slots=True)
class _Known:
    """One request, ended or not; times are the scheduler's."""

    asked: AskedRequest
    attempt: Attempt | None
    receipt: Receipt | None

    @property
    def arrived_at(self) -> float:
        return self.asked.arrived_at

    @property
    def request_id(self) -> str:
        return self.asked.submission.request_id

    def ended_by(self, now: float) -> float:
        return now if self.receipt is None else self.receipt.ended_at


@dataclass(frozen=True, slots=True)
class _Minutes:
    """The requests of a recording.

    Attributes:
        at: when it begins, on the scheduler's clock.
        earlier: those before it, which are not part of it.
    """

    at: float
    begins_idle: bool
    requests: list[_Known]
    earlier: list[_Known]


class MinutesRecorder:
    """Draws up recordings of one scheduler's requests."""

    def __init__(self, core: Scheduler, book: ReceiptBook, surroundings: RecordedSurroundings) -> None:
        self._core, self._book, self._surroundings = core, book, surroundings

    def recording(
        self, request_id: str, step_times: StepTimes, now: float
    ) -> Generator[None, None, Recording | None]:
        """The minutes around a request that has ended lately; None for one that is not known.

        It yields after each part of the work; the scheduler may go on meanwhile.

        Args:
            request_id: its own, or its client's.
            now: on the scheduler's clock.
        """
        receipt = self._book.find(request_id)
        if receipt is None or receipt.asked is None:
            return None
        # Copies: more may end between two parts.
        ended, under_way = tuple(self._book), tuple(self._book.under_way())
        known: list[_Known] = []
        for each in ended:
            if each.asked is not None:
                known.append(_Known(each.asked, each.attempts[-1] if each.attempts else None, each))
                if not len(known) % _SORTED:
                    yield
        known += (_Known(asked, attempts[-1] if attempts else None, None) for asked, attempts in under_way)
        known.sort(key=lambda each: each.asked.arrived_at)
        yield
        minutes = _minutes(known, receipt, now)
        standing, changes = self._surroundings.at(minutes.at)
        requests: list[RecordedRequest] = []
        for one in minutes.requests:
            requests.append(self._recorded(one, minutes.at))
            if not len(requests) % _DESCRIBED:
                yield
        return Recording(
            request_id=receipt.conclude.request_id,
            settings=_nameless_settings(standing.settings),
            partition=standing.partition,
            fleet=tuple(standing.fleet.values()),
            learned=_nameless_state(self._surroundings.learned_at(minutes.at)),
            changes=tuple(_since(minutes.at, change) for change in changes),
            step_times=step_times.by_pool,
            step_times_from=step_times.source,
            long_prompt_tokens=self._core.isolation.boundary_tokens,
            earlier_prompt_tokens=tuple(
                each.attempt.prompt_tokens for each in minutes.earlier if each.attempt is not None
            ),
            begins_idle=minutes.begins_idle,
            requests=tuple(requests),
        )

    def _recorded(self, known: _Known, at: float) -> RecordedRequest:
        asked, attempt, receipt = known.asked, known.attempt, known.receipt
        times = receipt.times if receipt is not None else None
        dispatched_s = attempt.at - at if attempt is not None else None
        first_token_s = None
        if dispatched_s is not None and times is not None and times.first_token_s is not None:
            first_token_s = dispatched_s + times.first_token_s
        wait_s = None
        if receipt is not None:
            wait_s = receipt.wait_s
        elif attempt is not None:
            wait_s = attempt.dispatch.queue_wait_s
        prompt_tokens, output_tokens = self._expected(known)
        patience_s = asked.expires_at - asked.arrived_at
        return RecordedRequest(
            submission=_nameless(asked.submission),
            client_id=(receipt.client_request_id if receipt is not None else "") or known.request_id,
            arrived_s=asked.arrived_at - at,
            expires_after_s=patience_s if patience_s < float("inf") else None,
            outcome=receipt.conclude.conclusion.outcome if receipt is not None else None,
            usage=receipt.usage if receipt is not None else None,
            wait_s=wait_s,
            dispatched_s=dispatched_s,
            first_token_s=first_token_s,
            ended_s=receipt.ended_at - at if receipt is not None else None,
            pool=attempt.dispatch.pool if attempt is not None else "",
            replica=attempt.dispatch.replica_id if attempt is not None else "",
            expected_prompt_tokens=prompt_tokens,
            expected_output_tokens=output_tokens,
        )

    def _expected(self, known: _Known) -> tuple[int, int]:
        """Tokens of its prompt and its answer: as estimated when it was sent, or as they would be now."""
        if known.attempt is not None:
            return known.attempt.prompt_tokens, round(known.attempt.output_tokens)
        asked = known.asked
        request = Request(submission=asked.submission, gateway_id="", arrived_at=asked.arrived_at)
        estimate = self._core.estimator.estimate(request)
        return estimate.expected_prompt_tokens, estimate.expected_output_tokens


def _minutes(known: list[_Known], receipt: Receipt, now: float) -> _Minutes:
    """Which of all requests, by arrival, are part of it."""
    own_id = receipt.conclude.request_id
    place = next(index for index, each in enumerate(known) if each.request_id == own_id)
    first, until = place, 0.0
    for index, each in enumerate(known[: place + 1]):
        if index == 0 or each.arrived_at > until:
            first = index
        until = max(until, each.ended_by(now))
    lead_from = known[place].arrived_at - LEAD_S
    earliest = max(first, place - MOST_BEFORE)
    while earliest < place and known[earliest].arrived_at < lead_from:
        earliest += 1
    at = known[earliest].arrived_at
    later = known[place + 1 : place + 1 + MOST_AFTER]
    end = receipt.ended_at + max(_AFTERWARDS_S, receipt.wait_s)
    requests = [
        *(each for each in known[:earliest] if each.ended_by(now) > at),
        *known[earliest : place + 1],
    ]
    for each in later:
        if each.arrived_at > max(until, receipt.ended_at) or each.arrived_at > end:
            break
        until = max(until, each.ended_by(now))
        requests.append(each)
    earlier = [each for each in known[:earliest] if each.ended_by(now) <= at]
    return _Minutes(at, earliest == first, requests, earlier[-_EARLIER:])


def _nameless(submission: Submission) -> Submission:
    """The same of a tenant whose name says nothing, with no key but its weight."""
    weight = submission.key.weight if submission.key is not None else None
    key = None if weight is None else KeyTerms(key_id="", weight=weight)
    return replace(submission, tenant=pseudonym(submission.tenant), key=key)


def _nameless_settings(settings: SchedulerSettings) -> SchedulerSettings:
    weights = {pseudonym(tenant): weight for tenant, weight in settings.fairness.weights.items()}
    return replace(settings, fairness=replace(settings.fairness, weights=weights))


def _nameless_state(learned: Mapping[str, Any]) -> dict[str, Any]:
    estimator = learned["estimator"]
    output = estimator["output"]
    tenants = [{**each, "tenant": pseudonym(each["tenant"])} for each in output["tenants"]]
    return {**learned, "estimator": {**estimator, "output": {**output, "tenants": tenants}}}


def _since(at: float, change: RecordedChange) -> RecordedChange:
    settings = None if change.settings is None else _nameless_settings(change.settings)
    return replace(change, at_s=change.at_s - at, settings=settings)
