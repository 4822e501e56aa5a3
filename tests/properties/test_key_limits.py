"""API key limits in random histories: they always hold, and ended requests are not counted for ever.

The machine records what was admitted, and when, from events and commands alone.
"""

import math
from dataclasses import dataclass

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, rule

from serve_app.core import events as ev
from serve_app.core.commands import Command, Conclude, Dispatch
from serve_app.core.dispatch.backpressure import BackpressureSettings
from serve_app.errors import Outcome
from serve_app.request import KeyTerms, Usage
from tests.builders import ManualDriver, key, one_replica, request

REQUESTS, TOKENS, CONCURRENT, QUEUED = 5, 400, 4, 2
KEYS = {
    "rated": key("rated", requests_per_minute=REQUESTS, tokens_per_minute=TOKENS),
    "narrow": key("narrow", concurrent=CONCURRENT, queued=QUEUED),
    "free": key("free"),
}
PROMPT_TOKENS, OUTPUT_TOKENS = 60, 20
ENDS = [Outcome.COMPLETED, Outcome.FAILED, Outcome.REJECTED_INVALID]


@dataclass
class Admitted:
    """One admitted request; `tokens` is its maximum charge, or its final count."""

    key_id: str
    at: float
    tokens: int
    is_over: bool = False
    counts_as_request: bool = True


class KeyLimitsMachine(RuleBasedStateMachine):
    requests = Bundle("requests")

    def __init__(self) -> None:
        super().__init__()
        self.driver = self.scheduler()
        self.now = 0.0
        self.number = 0
        self.known: dict[str, Admitted] = {}
        self.waiting: set[str] = set()
        self.running: set[str] = set()
        self.put_back: set[str] = set()

    def scheduler(self) -> ManualDriver:
        backpressure = BackpressureSettings(target_waiting=1, lag_factor=0.0, report_limit_s=1e9)
        return one_replica(max_waiting=8, backpressure=backpressure, limits={"max_num_seqs": 2})

    def feed(self, event: ev.Event) -> list[Command]:
        self.driver.now = self.now
        commands = self.driver.feed(event)
        for command in commands:
            if isinstance(command, Dispatch):
                self.waiting.discard(command.request_id)
                self.running.add(command.request_id)
            elif isinstance(command, Conclude):
                self.on_conclusion(command)
        return commands

    def on_conclusion(self, command: Conclude) -> None:
        name, outcome = command.request_id, command.conclusion.outcome
        self.waiting.discard(name)
        self.running.discard(name)
        admitted = self.known[name]
        admitted.is_over = True
        if not command.dispatched:
            admitted.tokens = 0
            admitted.counts_as_request = not outcome.is_rejection
        elif outcome not in {Outcome.COMPLETED, Outcome.CANCELLED}:
            admitted.tokens = 0

    @rule(
        target=requests,
        key_id=st.sampled_from(sorted(KEYS)),
        timeout_s=st.sampled_from([1.0, math.inf]),
        no_wait=st.booleans(),
    )
    def arrive(self, key_id: str, timeout_s: float, no_wait: bool) -> str:
        self.number += 1
        name = f"r{self.number}"
        self.known[name] = Admitted(key_id, self.now, PROMPT_TOKENS + OUTPUT_TOKENS)
        self.waiting.add(name)
        self.feed(
            ev.Arrived(
                request(
                    name,
                    prompt_tokens=PROMPT_TOKENS,
                    max_output_tokens=OUTPUT_TOKENS,
                    arrived_at=self.now,
                    expires_at=self.now + timeout_s,
                    gateway_id=f"g{self.number % 2}",
                    no_wait=no_wait,
                    key=KEYS[key_id],
                )
            )
        )
        return name

    @rule(name=consumes(requests), outcome=st.sampled_from(ENDS), output=st.integers(0, OUTPUT_TOKENS))
    def finish(self, name: str, outcome: Outcome, output: int) -> None:
        if name not in self.running:
            return
        is_complete = outcome is Outcome.COMPLETED
        usage = Usage(prompt_tokens=PROMPT_TOKENS, output_tokens=output) if is_complete else None
        if is_complete:
            self.known[name].tokens = PROMPT_TOKENS + output
        self.feed(ev.Finished(name, outcome, usage))

    @rule(name=requests)
    def cancel(self, name: str) -> None:
        self.feed(ev.Cancelled(name))

    @rule(name=requests, failure=st.sampled_from(list(ev.DispatchFailure)))
    def come_back(self, name: str, failure: ev.DispatchFailure) -> None:
        if name in self.running:
            self.running.discard(name)
            self.waiting.add(name)
            self.put_back.add(name)
            self.feed(ev.DispatchFailed(name, "r1", failure))
            self.driver.report("r1")

    @rule(gateway_id=st.sampled_from(["g0", "g1"]))
    def lose_gateway(self, gateway_id: str) -> None:
        self.feed(ev.GatewayLost(gateway_id))

    @rule()
    def replace_the_replica(self) -> None:
        self.feed(ev.ReplicaLost("r1"))
        self.driver.now = self.now
        self.driver.join("r1", "only", max_num_seqs=2)
        self.feed(ev.Woke())
        self.reread()

    @rule(seconds=st.sampled_from([0.3, 2.0, 20.0, 70.0]))
    def pass_time(self, seconds: float) -> None:
        self.now += seconds
        self.feed(ev.Woke())

    @rule(key_id=st.sampled_from(["rated", "narrow"]))
    def arrive_in_a_burst(self, key_id: str) -> None:
        for _ in range(REQUESTS + 2):
            self.arrive(key_id, math.inf, no_wait=False)

    def reread(self) -> None:
        """A report dispatches requests in commands that `ManualDriver` does not return."""
        for name in list(self.waiting):
            found = self.driver.scheduler.find(name)
            if found is not None and found.replica_id is not None:
                self.waiting.discard(name)
                self.running.add(name)

    @invariant()
    def no_minute_exceeds_a_limit(self) -> None:
        self.reread()
        rated = [one for one in self.known.values() if one.key_id == "rated"]
        for last in rated:
            minute = [one for one in rated if last.at - 60 < one.at <= last.at]
            assert sum(one.counts_as_request for one in minute) <= REQUESTS
            assert sum(one.tokens for one in minute if one.counts_as_request) <= TOKENS

    @invariant()
    def concurrent_requests_keep_their_limit(self) -> None:
        self.reread()
        for key_id in KEYS:
            held = [name for name in self.waiting | self.running if self.known[name].key_id == key_id]
            assert self.accounts.open_requests(key_id) == len(held)
            if key_id == "narrow":
                assert len(held) <= CONCURRENT
                assert len([name for name in held if name in self.waiting - self.put_back]) <= QUEUED

    @invariant()
    def waiting_requests_are_counted_by_key(self) -> None:
        self.reread()
        counts = self.driver.scheduler.queue.waiting_by_key
        held = [self.known[name].key_id for name in self.waiting]
        assert dict(counts) == {key_id: held.count(key_id) for key_id in held}

    @property
    def accounts(self):  # type: ignore[no-untyped-def]
        return self.driver.scheduler.admission.keys

    def teardown(self) -> None:
        """A minute after all requests have ended, every limit is fully available."""
        for name in list(self.waiting | self.running):
            self.feed(ev.Cancelled(name))
        self.now += 62.0
        self.feed(ev.Woke())
        terms: KeyTerms = KEYS["rated"]
        status = self.accounts.status(terms, self.now)
        assert status.requests.remaining == REQUESTS
        assert status.tokens.remaining == TOKENS
        assert all(self.accounts.open_requests(key_id) == 0 for key_id in KEYS)
        assert not self.driver.scheduler.queue.waiting_by_key


TestKeyLimits = KeyLimitsMachine.TestCase
TestKeyLimits.settings = settings(
    max_examples=60, stateful_step_count=40, suppress_health_check=[HealthCheck.too_slow]
)
