"""Life of a request: every event in every state, against the rules of `path`.

A real gateway reads the requests and forwards the answers. The test plays the client, the scheduler and the
engine, and predicts the next state, the reports to the scheduler and what the client has received.
"""

import asyncio
import itertools
import json
import time
from collections.abc import Callable
from typing import Any
from unittest.mock import Mock, patch

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from serve_app.core.events import DispatchFailure
from serve_app.errors import HTTP_STATUS, Outcome
from serve_app.request import RequestTimes
from serve_app.serving.channel.scheduler_client import ChannelRequest
from serve_app.serving.gateway import Gateway, path
from serve_app.serving.gateway.batches.runner import CollectingExchange
from serve_app.serving.gateway.path import Request, State
from serve_app.serving.gateway.settings import RouteSettings, ServedModel
from serve_app.serving.gateway.upstream import (
    EngineSilentError,
    UpstreamError,
    UpstreamPool,
    UpstreamResponse,
)
from tests.parity.jumping_loop import JumpingLoop

from .builders import MODEL, FakeDispatcher, chat, error_json, gateway, rejection, usage_json

READING, QUEUED, SENDING, ANSWERING, ENDED = State
CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
PROMPT, CONTEXT, COMMENT_S = [7, 8, 9], 7, 5.0
# Models with the longest contexts of their engines.
LONGEST = {"a": 4096, "b": CONTEXT}
# Kinds of requests, by how their answers are forwarded: passed on as they arrive or assembled, both in parts
# that several engines generate and of one engine, and complete. A seed depends on more than the tokens.
KINDS: dict[str, tuple[dict[str, Any], str]] = {
    "continued": ({"stream": True}, "default"),
    "assembled from parts": ({}, "batch"),
    "passed": ({"stream": True, "seed": 1}, "default"),
    "assembled": ({"seed": 1}, "batch"),
    "whole": ({}, "default"),
}
CONTINUED = ("continued", "assembled from parts")
STREAMS = ("continued", "passed")
EVENTS: Any = [(b"content-type", b"text/event-stream")]
JSON: Any = [(b"content-type", b"application/json")]
TOO_LONG = "This model's maximum context length is 512 tokens. However, your prompt contains 900 input tokens"
# Answers of engines that do not begin a stream: status, message, and the failure for which another replica
# serves the request.
REFUSALS: list[tuple[int, str, DispatchFailure | None]] = [
    (503, "not now", DispatchFailure.BUSY),
    (401, "who are you", DispatchFailure.UNREACHABLE),
    (400, TOO_LONG, DispatchFailure.TOO_LONG),
    (500, "EngineCore encountered an issue", DispatchFailure.LOST),
    (500, "out of memory", DispatchFailure.ENGINE_ERROR),
    (400, "no such parameter", None),
]
REJECTIONS = [Outcome.REJECTED_QUEUE_FULL, Outcome.EXPIRED, Outcome.FAILED, Outcome.REJECTED_INVALID]


def test_the_transitions_are_those_of_the_table() -> None:
    rows = [line.split("|")[1:4] for line in (path.__doc__ or "").splitlines() if line.startswith("| ")]
    documented = {
        state.strip(): set(after.replace(" ", "").split(",")) - {""} for state, _, after in rows[1:]
    }
    assert documented == {a.name: {b.name for b in after} for a, after in path.TRANSITIONS.items()}


TOOL = {"type": "function", "function": {"name": "f"}}
STREAM, BACKGROUND = {"stream": True}, {"background": True}


@pytest.mark.parametrize(
    ("path", "fields", "priority", "is_revocable", "is_continuable"),
    [
        (CHAT, {}, "batch", True, True),
        (CHAT, {"n": 1, "max_tokens": 9, "temperature": 0.5, "user": "u"}, "batch", True, True),
        (CHAT, {"service_tier": "flex"}, "", True, True),
        (COMPLETIONS, {"prompt": "hello"}, "batch", True, True),
        (CHAT, {}, "", False, False),
        (CHAT, {"seed": 1}, "batch", True, False),
        (CHAT, {"stop": "x"}, "batch", True, False),
        (CHAT, {"tools": [TOOL]}, "batch", True, False),
        (CHAT, {"n": 1, "presence_penalty": 1}, "batch", True, False),
        (CHAT, STREAM, "", True, True),
        (CHAT, {**STREAM, "seed": 1}, "", False, False),
        (CHAT, {**STREAM, "tools": [TOOL]}, "batch", False, False),
        (CHAT, {**STREAM, "n": 2}, "", False, False),
        ("/v1/responses", {"input": "hello"}, "batch", True, False),
        ("/v1/responses", {"input": "hello", **BACKGROUND}, "batch", False, False),
        ("/v1/embeddings", {"input": "hello"}, "batch", False, False),
        ("/v1/score", {"text_1": "a", "text_2": "b"}, "batch", False, False),
    ],
)
@pytest.mark.parametrize("waits", [True, False])
async def test_a_grant_is_revocable_if_its_client_would_not_notice(
    path: str, fields: dict[str, Any], priority: str, is_revocable: bool, is_continuable: bool, waits: bool
) -> None:
    scheduler = Scheduler([1], names_responses=True)
    app = gateway(scheduler, models=(ServedModel(name=MODEL, resume_streams=True, max_model_len=100),))
    document = chat(**fields) if path == CHAT else {"model": MODEL, **fields}
    headers = [(b"x-priority", priority.encode())] if priority else []
    headers += [] if waits else [(b"x-queue", b"no-wait")]
    exchange = CollectingExchange(path, json.dumps(document).encode(), headers)
    app(exchange)
    assert scheduler.last.submission.revocable is (is_revocable and (waits or "stream" in fields))
    with patch.object(UpstreamPool, "start", return_value=Response()) as start:
        scheduler.decide()
    is_kept = is_continuable and (waits or "stream" in fields)
    assert (b'"return_token_ids":true' in start.call_args.args[2]) is is_kept
    exchange.disconnect()
    app.close()


class Scheduler(FakeDispatcher):
    """Scheduler that decides when the test does.

    Attributes:
        last: the request that waits.
        noted: ends of requests without a grant, in order.
    """

    last: ChannelRequest
    noted: list[Outcome]

    def _wait(self, request: ChannelRequest) -> None:
        self.last = request
        self._waits[request] = Mock()

    def note_end(self, request: ChannelRequest, outcome: Outcome, times: RequestTimes) -> None:
        super().note_end(request, outcome, times)
        self.noted.append(outcome)

    def decide(self, conclusion: Any = None) -> None:
        """Reject the queued request, or grant it."""
        del self._waits[self.last]
        if conclusion is not None:
            self.last.on_rejection(conclusion)
            return
        self.in_flight.add(self.last.submission.request_id)
        self.last.on_grant(*self.granted(self.last.submission.request_id, 1))


class Response(UpstreamResponse):
    """Response whose parts arrive when the test sends them."""

    is_closed = False

    def close(self) -> None:
        super().close()
        self.is_closed = True

    def arrive(self, *events: Any, headers: Any = None, status: int = 200, ends: bool = False) -> None:
        """Receive a head, some events, bytes or the end."""
        if headers is not None:
            self.status, self.headers = status, headers
        self.pieces += [
            each if isinstance(each, bytes) else b"data: %b\n\n" % json.dumps(each).encode()
            for each in events
        ]
        if ends:
            self.end()
        if self.on_change is not None:
            self.on_change()


class Client(CollectingExchange):
    """Client that may stop reading; its server's buffer has room for one more piece."""

    reads = True
    unread = 0

    @property
    def is_choked(self) -> bool:
        return not self.reads

    def start_response(self, *rest: Any) -> None:
        assert not self.status, "a second head"
        super().start_response(*rest)

    def write_chunk(self, piece: bytes, *, ends: bool = False) -> bool:
        assert self.status, "a piece before the head"
        assert not self.response_complete, "a piece after the end"
        self.unread += not (self.reads or ends)
        super().write_chunk(piece, ends=ends)
        return self.reads

    def events(self) -> list[Any]:
        """Return the events of a stream, or the one document of another answer."""
        body = b"".join(self.pieces).decode().replace(": queued\n\n", "")
        parts = [body] if body.startswith("{") else body.split("data: ")[1:]
        return [json.loads(part) for part in parts if "[DONE]" not in part]

    def choices(self) -> list[Any]:
        return [each["choices"][0] for each in self.events() if each.get("choices")]

    def text(self) -> str:
        parts = [each.get("delta") or each.get("message") or each for each in self.choices()]
        return "".join(part.get("content") or part.get("text") or "" for part in parts)


def word(number: int) -> str:
    """Return a word; the third one may be held back, because it ends with a sign."""
    return f" w{number}" + "," * (number == 2)


def words(count: int) -> str:
    return "".join(map(word, range(count)))


PROGRESS: Any = {
    "steps": st.integers(1, 9),
    "can_continue": st.sampled_from([True, True, False]),
    "ignores": st.sampled_from([False, False, True]),
}
ARRIVAL: Any = {
    "path": st.sampled_from([CHAT, COMPLETIONS]),
    "kind": st.sampled_from(list(KINDS)),
    "routed": st.booleans(),
    "counts": st.booleans(),
    "limit": st.sampled_from([4, 100]),
    "stages": st.lists(st.fixed_dictionaries(PROGRESS), max_size=3),
}


def is_open(life: "Life") -> bool:
    return life.state is not ENDED


def is_queued(life: "Life") -> bool:
    return life.state is QUEUED


def has_grant(life: "Life") -> bool:
    return life.state in (SENDING, ANSWERING)


def awaits_head(life: "Life") -> bool:
    return life.state is SENDING and not life.has_head


def streams(life: "Life") -> bool:
    return life.is_streaming and not life.ignores


def is_unfinished(life: "Life") -> bool:
    return life.is_streaming and not life.is_finished


class Life(RuleBasedStateMachine):
    """One request after another in a gateway with two models; the route tries the second one as well.

    Attributes:
        resumed: models whose streams can be continued.
        faults: of callbacks.
        engine_failed: the model's engine has reported an error.
        gave_up: the model's engine has begun an answer anew that it should have continued.
        failures: of put-backs, in order, with the words that each continues with.
        begun: the client has a part of the answer.
        is_continuing: the engine was asked for an answer that another one can continue.
        ignores: it begins anew.
        is_unseen: the gateway would see that, but reads nothing, because its client does not.
        base: words with which the attempt began.
        made: words that have been generated, with those.
        is_finished: the last one is among them.
        fed: words that the gateway has read, and that need not be generated again.
        sent: words that the client of a stream has received.
        is_complete: the gateway has read the last one.
        has_output: the attempt's first token was reported.
    """

    def __init__(self) -> None:
        super().__init__()
        self.loop = JumpingLoop()
        self.faults: list[Any] = []
        self.loop.set_exception_handler(lambda _, context: self.faults.append(context))
        self.scheduler = Scheduler([1], max_model_len=CONTEXT)
        self.upstream = patch.object(UpstreamPool, "start", self.receive)
        self.upstream.start()
        self.responses: list[Response] = []
        self.bodies: list[Any] = []
        self.state = ENDED

    def teardown(self) -> None:
        self.upstream.stop()
        # A history may end within `begin`.
        if hasattr(self, "gateway"):
            self.gateway.close()
        self.loop.close()

    def receive(self, _address: Any, _head: bytes, body: bytes, on_change: Any) -> UpstreamResponse:
        """Receive a request as its engine."""
        self.bodies.append(json.loads(body))
        self.responses.append(Response(on_change))
        return self.responses[-1]

    def build(self) -> Gateway:
        models = tuple(
            ServedModel(name=name, resume_streams=name in self.resumed, max_model_len=longest)
            for name, longest in LONGEST.items()
        )
        route = RouteSettings(name="route", models={"a": 1.0}, fallbacks=("b",))
        more = {"queue_comment_interval_s": COMMENT_S, "log_requests": False}
        return gateway(self.scheduler, models=models, routes=(route,), **more)

    def on_loop(self, call: Callable[..., Any], *args: Any, **options: Any) -> None:
        """Call something as a callback of the event loop."""

        async def called() -> None:
            call(*args, **options)

        self.loop.run_until_complete(called())

    # The client.

    @initialize(resumed=st.sampled_from(["ab", "a", "b"]), arrival=st.fixed_dictionaries(ARRIVAL))
    def begin(self, arrival: dict[str, Any], resumed: str = "ab") -> None:
        self.resumed = resumed
        self.gateway = self.build()
        self.arrives(**arrival)

    @precondition(lambda self: self.state is ENDED)
    @rule(**ARRIVAL)
    def arrives(
        self, path: str, kind: str, *, routed: bool, counts: bool, limit: int, stages: list[Any]
    ) -> None:
        """A request arrives, and is served for some steps, perhaps by one replica after another."""
        fields, priority = KINDS[kind]
        document = {**chat(max_tokens=limit, **fields), "model": "route" if routed else "a"}
        self.counts = counts or "stream" not in fields
        if counts and "stream" in fields:
            document["stream_options"] = {"include_usage": True}
        if path == COMPLETIONS:
            del document["messages"]
            document["prompt"] = "count"
        self.path, self.kind, self.model, self.may_fall_back = path, kind, "a", routed
        self.limit = limit
        self.begun = self.is_commented = self.engine_failed = self.gave_up = self.is_continuing = False
        self.is_unseen = False
        self.fed = self.sent = self.first_tokens = 0
        self.first_id = self.reason = ""
        self.rejected: tuple[Outcome, str] | None = None
        self.failures: list[tuple[DispatchFailure, int]] = []
        self.outcomes: list[Outcome] = []
        self.noted: list[Outcome] = []
        self.scheduler.noted = []
        self.scheduler.events.clear()
        self.scheduler.generated_tokens.clear()
        self.client = Client(path, json.dumps(document).encode(), [(b"x-priority", priority.encode())])
        self.on_loop(self.gateway, self.client)
        self.state = QUEUED
        assert isinstance(self.scheduler.last, Request)
        self.request = self.scheduler.last
        self.id = self.request.submission.request_id
        for number, stage in enumerate(stages):
            if number and self.state in (SENDING, ANSWERING):
                self.is_lost(is_silent=False, is_cut=False)
            self.proceeds(**stage)

    @precondition(is_open)
    @rule(**PROGRESS)
    def proceeds(self, steps: int, *, can_continue: bool, ignores: bool) -> None:
        """The request is served without an incident for some steps."""
        for _ in range(steps):
            if self.state is QUEUED:
                self.is_granted(can_continue=can_continue)
            elif self.state in (SENDING, ANSWERING) and not self.has_head:
                self.begins(ignores=ignores)
            elif self.state in (SENDING, ANSWERING) and self.kind == "whole":
                self.ends_whole()
            elif self.is_streaming and not self.is_finished:
                self.continues(reason=None if self.made < 3 else "stop" if self.failures else "length")
            elif self.is_streaming:
                self.ends(reason="stop")

    @precondition(is_open)
    @rule(is_stopped=st.booleans())
    def leaves(self, *, is_stopped: bool) -> None:
        """The client disconnects, or the server stops."""
        if is_stopped:
            self.is_stopped()
            return
        self.on_loop(self.client.disconnect)
        assert ("cancelled_in_queue" in self.scheduler.names()) is (self.state is QUEUED)
        self.end(Outcome.CANCELLED)

    @precondition(lambda self: self.state is ANSWERING)
    @rule()
    def stops_reading(self) -> None:
        self.client.reads = False

    @precondition(lambda self: not self.client.reads)
    @rule()
    def reads_again(self) -> None:
        self.client.reads, self.client.unread = True, 0
        if self.client.on_writable is not None:
            self.on_loop(self.client.on_writable)
        if self.is_unseen:
            self.cannot_continue()
        elif self.state in (SENDING, ANSWERING):
            self.feed()

    @precondition(lambda self: self.client.reads)
    @rule()
    def waits(self) -> None:
        """Streams have comments until the answer begins."""
        before = len(self.client.pieces)
        self.loop.run_until_complete(asyncio.sleep(COMMENT_S * 1.5))
        waits = self.kind in STREAMS and self.state is not ENDED and not self.begun
        self.is_commented |= waits
        assert set(self.client.pieces[before:]) == ({b": queued\n\n"} if waits else set())

    # The server and the scheduler.

    def is_stopped(self) -> None:
        assert self.loop.run_until_complete(self.gateway.drain(0, 7.0)) == 1
        if self.begun:
            self.end(Outcome.FAILED, "the server stopped during this answer")
        else:
            self.end(Outcome.REJECTED_STOPPING, "the server is stopping", 503)
            assert self.is_commented or self.client.answer().headers[b"retry-after"] == b"7"
        error = self.client.events()[-1]["error"]
        assert (error["type"], error["code"]) == ("server_error", "shutting_down")
        self.gateway.close()
        self.gateway = self.build()

    @precondition(is_queued)
    @rule(can_continue=st.booleans())
    def is_granted(self, *, can_continue: bool) -> None:
        self.scheduler.names_responses = can_continue
        may_continue = self.kind in CONTINUED and (self.kind != "continued" or self.model in self.resumed)
        self.is_continuing = can_continue and may_continue and not self.gave_up
        self.on_loop(self.scheduler.decide)
        self.state = SENDING
        if self.begun and not self.is_continuing:
            self.cannot_continue()
        else:
            self.start(self.fed if self.is_continuing else 0)

    @precondition(is_queued)
    @rule(outcome=st.sampled_from(REJECTIONS))
    def is_rejected(self, outcome: Outcome) -> None:
        self.on_loop(self.scheduler.decide, rejection(outcome, "it is refused"))
        if self.may_try_another and outcome is not Outcome.REJECTED_INVALID:
            self.fall_back(outcome, "it is refused")
        elif self.begun or outcome is Outcome.REJECTED_INVALID:
            self.end(outcome, "it is refused", HTTP_STATUS[outcome])
        else:
            # Of several models, the first one's rejection is the client's.
            first, message = self.rejected or (outcome, "it is refused")
            self.end(first, message, HTTP_STATUS[first])

    @precondition(is_open)
    @rule()
    def is_revoked(self) -> None:
        """A queued request has no grant. A complete answer is not lost, nor one that cannot be continued."""
        self.on_loop(self.request.on_revocation)
        keeps = self.is_complete if self.is_continuing else self.begun
        if self.state is not QUEUED and not keeps:
            self.queue_again(DispatchFailure.REVOKED)

    def is_late(self) -> None:
        """Messages of the scheduler after the end change nothing."""
        before = list(self.client.pieces), list(self.scheduler.events), len(self.bodies)
        self.on_loop(self.request.on_grant, *self.scheduler.granted(self.id, 1))
        self.on_loop(self.request.on_rejection, rejection(Outcome.EXPIRED))
        self.on_loop(self.request.on_revocation)
        assert before == (self.client.pieces, self.scheduler.events, len(self.bodies))

    # The engine.

    @precondition(awaits_head)
    @rule(refusal=st.sampled_from(REFUSALS), times=st.integers(1, 2))
    def refuses(self, refusal: tuple[int, str, DispatchFailure | None], times: int) -> None:
        """The engine refuses the request, and perhaps the next one does, too."""
        for _ in range(times):
            if self.state is QUEUED:
                self.is_granted(can_continue=True)
            if self.state is SENDING:
                self.refuse(*refusal)

    def refuse(self, status: int, message: str, failure: DispatchFailure | None) -> None:
        body = json.dumps(error_json(message, status)).encode()
        self.arrive(body, headers=JSON, status=status, ends=True)
        if status == 400 and self.base:
            self.cannot_continue()
        elif failure is None:
            self.end(Outcome.REJECTED_INVALID, message, status)
        else:
            self.fail(failure, message)

    @precondition(lambda self: self.state is SENDING and not self.has_head and self.begun)
    @rule()
    def answers_without_a_stream(self) -> None:
        self.arrive(b"{}", headers=JSON, ends=True)
        self.end(Outcome.FAILED, "the answer is incomplete")

    @precondition(lambda self: self.state in (SENDING, ANSWERING) and not self.has_head)
    @rule(ignores=st.booleans())
    def begins(self, *, ignores: bool) -> None:
        """The head arrives, and in chats an event before the first word."""
        self.has_head, self.ignores = True, ignores and self.base > 0
        if self.kind == "whole":
            self.arrive(b'{"choices": ', headers=JSON)
            return
        role = {"index": 0, "delta": {"role": "assistant", "content": ""}, "finish_reason": None}
        self.arrive(*[self.event(role)] if self.path == CHAT else [], headers=EVENTS)
        if self.ignores and self.path == CHAT:
            self.shows_that_it_ignores()
        else:
            self.feed()

    @precondition(is_unfinished)
    @rule(reason=st.sampled_from([None, None, "stop", "length"]))
    def continues(self, *, reason: str | None) -> None:
        """The next word arrives, and the reason if it is the last one."""
        self.arrive(self.next_word(reason))
        if self.ignores:
            self.shows_that_it_ignores()
        else:
            self.feed()

    def shows_that_it_ignores(self) -> None:
        """The engine has sent the ids of the prompt alone."""
        self.is_unseen = not self.client.reads
        if not self.is_unseen:
            self.cannot_continue()

    @precondition(streams)
    @rule(code=st.sampled_from([400, 500]), after_word=st.booleans())
    def reports_an_error(self, code: int, *, after_word: bool) -> None:
        """The stream ends with an error, and perhaps with a word before it."""
        events = [self.next_word(None)] if after_word and not self.is_finished else []
        self.arrive(*events, error_json("out of memory", code), b"data: [DONE]\n\n", ends=True)
        is_final = self.forwards == "passed" and self.has_output
        outcome = Outcome.REJECTED_INVALID if code == 400 else Outcome.FAILED
        is_retried = code == 500 and not is_final and (not self.engine_failed or self.may_try_another)
        self.read(is_forwarded=not is_retried)
        if is_retried:
            self.fail(DispatchFailure.ENGINE_ERROR, "out of memory")
        else:
            self.end(outcome, "out of memory", code)

    @precondition(has_grant)
    @rule(is_silent=st.booleans(), is_cut=st.booleans())
    def is_lost(self, *, is_silent: bool, is_cut: bool) -> None:
        """The connection breaks, perhaps within an event, or the engine sends nothing for too long."""
        if is_cut and self.has_head:
            self.arrive(b'data: {"half')
        kind = EngineSilentError if is_silent else UpstreamError
        self.on_loop(self.responses[-1].break_off, kind(DispatchFailure.LOST, "it broke"))
        self.client.unread = 0
        if self.is_unseen:
            self.cannot_continue()
            return
        if self.forwards == "continued":
            self.read()
        if self.forwards == "passed" and self.has_output:
            self.end(Outcome.FAILED, "the engine failed during its answer")
        elif is_silent:
            self.end(Outcome.FAILED, "did not answer in time", 504)
        else:
            self.queue_again(DispatchFailure.LOST)

    @precondition(streams)
    @rule(reason=st.sampled_from(["stop", "length"]))
    def ends(self, reason: str) -> None:
        """The rest of the answer arrives at once."""
        events = []
        while not self.is_finished:
            events.append(self.next_word(reason if self.made >= 3 else None))
        counts = usage_json(len(PROMPT) + self.base, self.made - self.base)
        events += [{"id": self.own_id, "choices": [], "usage": counts}, b"data: [DONE]\n\n"]
        self.arrive(*events, ends=True)
        if self.is_unseen:
            self.cannot_continue()
            return
        self.read(is_forwarded=False)
        is_full = self.reason == "length" and len(PROMPT) + self.made in (CONTEXT - 1, CONTEXT)
        is_full &= self.made != self.limit and self.model == "a"
        if is_full and self.is_continuing and self.fed:
            self.queue_again(DispatchFailure.TOO_LONG)
        else:
            self.read(is_forwarded=True)
            self.complete()

    @precondition(lambda self: self.kind == "whole" and self.state is SENDING and self.has_head)
    @rule()
    def ends_whole(self) -> None:
        self.made, self.reason = 3, "stop"
        choice = {"text": words(3)} if self.path == COMPLETIONS else {"message": {"content": words(3)}}
        document = {"choices": [{"index": 0, **choice, "finish_reason": self.reason}], "id": self.own_id}
        rest = json.dumps({**document, "usage": usage_json(len(PROMPT), 3)}).removeprefix('{"choices": ')
        self.arrive(rest.encode(), ends=True)
        self.complete()

    def arrive(self, *events: Any, **options: Any) -> None:
        """Let a part of the engine's answer arrive."""
        self.on_loop(self.responses[-1].arrive, *events, **options)

    def next_word(self, reason: str | None) -> Any:
        """Generate the next word, which is the last one if there is a reason or the limit is reached."""
        reason = "length" if self.made + 1 == self.limit else reason
        text = word(self.made)
        choice: dict[str, Any] = {"delta": {"content": text}} if self.path == CHAT else {"text": text}
        ids = {"token_ids": [self.made]} if self.is_continuing else {}
        event = self.event({"index": 0, **choice, **ids, "finish_reason": reason})
        self.made, self.is_finished, self.reason = self.made + 1, reason is not None, reason or ""
        return event

    def event(self, choice: dict[str, Any]) -> Any:
        """Return an event with this choice; the first one has the ids of the prompt."""
        event: dict[str, Any] = {
            "id": self.own_id,
            "object": "chat.completion.chunk",
            "model": "a",
            "choices": [choice],
        }
        if self.is_continuing and self.made == self.base:
            prompt = PROMPT if self.ignores else [*PROMPT, *range(self.base)]
            (event if self.path == CHAT else choice)["prompt_token_ids"] = prompt
        return event

    # What the rules of `path` say.

    @property
    def is_streaming(self) -> bool:
        return self.state in (SENDING, ANSWERING) and self.has_head and self.kind != "whole"

    @property
    def may_try_another(self) -> bool:
        return self.may_fall_back and not self.begun

    @property
    def forwards(self) -> str:
        """Kind of request of which this attempt's answer would be."""
        if self.kind == "continued" and not self.is_continuing:
            return "passed"
        return "assembled" if self.kind == "assembled from parts" else self.kind

    def start(self, base: int) -> None:
        """The engine has received the request with these words."""
        self.state, self.base, self.made, self.fed = SENDING, base, base, base
        self.own_id = f"answer-{len(self.bodies)}"
        self.first_id = self.first_id if base else self.own_id
        self.has_head = self.ignores = self.is_unseen = self.has_output = False
        self.is_finished = self.is_complete = False
        sent, is_chat = self.bodies[-1], self.path == CHAT
        ids: Any = (
            (sent.get("kv_transfer_params") or {}).get("prompt_token_ids") if is_chat else sent["prompt"]
        )
        assert sent["model"] == self.model
        assert sent.get("return_token_ids", False) is self.is_continuing
        assert ids == ([*PROMPT, *range(base)] if base else None if is_chat else "count")
        assert sent["max_completion_tokens" if base and is_chat else "max_tokens"] == self.limit - base

    def feed(self) -> None:
        """Of a stream that can be continued, a client that does not read gets nothing."""
        if self.forwards != "continued" or self.client.reads:
            self.read()

    def read(self, *, is_forwarded: bool | None = None) -> None:
        """The gateway has read everything.

        Args:
            is_forwarded: the client of a stream receives it; by default if there is output.
        """
        has_ended = self.responses[-1].has_ended
        if self.forwards == "continued":
            is_output = self.made > self.base or (has_ended and self.responses[-1].error is None)
        elif self.forwards == "assembled":
            is_output = self.made > self.base or has_ended
        else:
            is_output = self.made > self.base if is_forwarded is None else is_forwarded
        if is_output and not self.has_output and self.kind != "whole":
            self.has_output = True
            self.first_tokens += 1
        # A lost answer continues after a word that ends with a letter and is not the last one.
        self.fed = self.made
        if self.is_continuing:
            self.fed -= self.is_finished
            self.fed -= self.fed == 3
        self.is_complete = self.is_finished
        if is_forwarded is None:
            is_forwarded = self.has_output and self.fed > self.sent
        if is_forwarded and self.forwards in STREAMS:
            self.state, self.begun, self.sent = ANSWERING, True, self.fed

    def queue_again(self, failure: DispatchFailure) -> None:
        self.state = QUEUED
        self.fed = self.fed if self.is_continuing else 0
        self.failures.append((failure, self.fed))

    def fail(self, failure: DispatchFailure, message: str) -> None:
        """A second error of the model's engine itself is another model's, or the client's."""
        if failure is not DispatchFailure.ENGINE_ERROR or not self.engine_failed:
            self.engine_failed |= failure is DispatchFailure.ENGINE_ERROR
            self.queue_again(failure)
        elif self.may_try_another:
            self.fall_back(Outcome.FAILED, message)
        else:
            self.end(Outcome.FAILED, message, 500)

    def fall_back(self, outcome: Outcome, message: str) -> None:
        """The next model of the route begins anew."""
        self.rejected = outcome, message
        self.report(outcome)
        self.state, self.model, self.may_fall_back, self.fed = QUEUED, "b", False, 0
        self.engine_failed = self.gave_up = False

    def cannot_continue(self) -> None:
        """The engine begins anew by the same grant, unless the client has a part of the answer."""
        self.is_unseen = False
        if self.begun:
            self.end(Outcome.FAILED, "the answer is incomplete")
        else:
            self.gave_up, self.is_continuing = True, False
            self.start(0)

    def complete(self) -> None:
        """The client has the whole answer, and the scheduler the usage of all parts."""
        self.fed = self.made
        self.end(Outcome.COMPLETED)
        usage = self.scheduler.events[-1][2]
        assert (usage.prompt_tokens, usage.output_tokens) == (len(PROMPT), self.made)
        assert self.client.status == 200
        assert self.client.text() == words(self.made)
        events = self.client.events()
        assert {each["id"] for each in events} == {self.first_id}
        usages = [each["usage"] for each in events if each.get("usage")]
        assert usages == ([usage_json(len(PROMPT), self.made)] if self.counts else [])
        reasons = [each["finish_reason"] for each in self.client.choices() if each.get("finish_reason")]
        assert reasons == [self.reason]
        assert b"token_ids" not in b"".join(self.client.pieces)

    def end(self, outcome: Outcome, message: str = "", status: int = 200) -> None:
        """The request has this outcome; an error has this message."""
        self.report(outcome)
        self.state, self.outcome = ENDED, outcome
        assert self.client.response_complete is (outcome is not Outcome.CANCELLED)
        if message:
            assert self.client.status == (200 if self.begun or self.is_commented else status)
            (error,) = [each["error"]["message"] for each in self.client.events() if "error" in each]
            assert message in error
        self.is_late()

    def report(self, outcome: Outcome) -> None:
        """The end at one model is reported to its scheduler, and releases the grant if there is one."""
        (self.noted if self.state is QUEUED else self.outcomes).append(outcome)

    @invariant()
    def is_in_one_state(self) -> None:
        assert not self.faults
        is_granted, is_open = self.state in (SENDING, ANSWERING), self.state is not ENDED
        assert self.request.state is self.state
        assert self.scheduler.waiting == (self.state is QUEUED)
        assert self.scheduler.in_flight == ({self.id} if is_granted else set())
        assert sum(not (each.is_closed or each.has_ended) for each in self.responses) == is_granted
        assert self.gateway.open_requests == self.gateway.in_flight == is_open

    @invariant()
    def reports_each_grant_once(self) -> None:
        kept = self.scheduler.generated_tokens
        assert list(zip(self.scheduler.put_backs(), kept, strict=True)) == self.failures
        assert (self.scheduler.outcomes(), self.scheduler.noted) == (self.outcomes, self.noted)
        assert self.scheduler.names().count("first_token") == self.first_tokens

    @invariant()
    def is_revocable_if_its_client_would_not_notice(self) -> None:
        resumes = self.kind == "continued" and self.model in self.resumed
        is_revocable = resumes or self.kind in ("assembled", "assembled from parts")
        assert self.scheduler.submissions[-1].revocable is is_revocable

    @invariant()
    def sends_each_word_once(self) -> None:
        text = self.client.text()
        assert words(self.fed).startswith(text)
        assert self.client.unread <= 1
        is_sent = self.state is ENDED and self.outcome is not Outcome.CANCELLED
        if self.begun and (is_sent or (self.state is ANSWERING and self.client.reads)):
            assert text == words(self.fed)


Life.TestCase.settings = settings(max_examples=150, stateful_step_count=30)
TestLife = Life.TestCase


Event = tuple[str, dict[str, Any]]


def event(name: str, **arguments: Any) -> Event:
    return name, arguments


def steps(count: int, *, ignores: bool = False) -> Event:
    return event("proceeds", steps=count, can_continue=True, ignores=ignores)


def arrival(path: str, kind: str, count: int) -> dict[str, Any]:
    stages = [dict(steps(count)[1])]
    return {
        "path": path,
        "kind": kind,
        "routed": True,
        "counts": path == CHAT,
        "limit": 100 if path == CHAT else 4,
        "stages": stages,
    }


def happens(life: Life, name: str, arguments: dict[str, Any]) -> None:
    getattr(life, name)(**arguments)
    life.is_in_one_state()
    life.reports_each_grant_once()
    life.sends_each_word_once()


LOST = event("is_lost", is_silent=False, is_cut=False)
WORDS = [event("continues", reason=None)] * 3
FAULT = REFUSALS[4]
INCIDENTS: list[tuple[Callable[[Life], bool], Event]] = [
    *((is_open, event("leaves", is_stopped=is_stopped)) for is_stopped in (False, True)),
    (is_open, event("waits")),
    (is_open, event("is_revoked")),
    (lambda life: life.state is ANSWERING, event("stops_reading")),
    *((is_queued, event("is_rejected", outcome=outcome)) for outcome in REJECTIONS),
    *((awaits_head, event("refuses", refusal=refusal, times=1)) for refusal in REFUSALS),
    (awaits_head, event("refuses", refusal=FAULT, times=2)),
    (lambda life: awaits_head(life) and life.begun, event("answers_without_a_stream")),
    (has_grant, LOST),
    (has_grant, event("is_lost", is_silent=True, is_cut=True)),
    *((is_unfinished, event("continues", reason=reason)) for reason in ("stop", "length")),
    *((streams, event("ends", reason=reason)) for reason in ("stop", "length")),
    (streams, event("reports_an_error", code=400, after_word=True)),
    *((streams, event("reports_an_error", code=500, after_word=after)) for after in (False, True)),
]


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
@pytest.mark.parametrize(
    ("kind", "is_lost"), [*((kind, False) for kind in KINDS), *((kind, True) for kind in CONTINUED)]
)
def test_each_event_in_each_state(path: str, kind: str, is_lost: bool) -> None:
    """Each event happens after each step of a request, also of one that was lost before, which then ends."""
    life = Life()
    life.begin(arrival(path, kind, 20))
    for count, (may_happen, happening) in itertools.product(range(9), INCIDENTS):
        life.arrives(**arrival(path, kind, 4 if is_lost else count))
        if is_lost:
            happens(life, *LOST)
            happens(life, *steps(count))
        if may_happen(life):
            happens(life, *happening)
        happens(life, *steps(20))
        assert life.state is ENDED
    life.teardown()


@pytest.mark.parametrize(
    ("kind", "count", "events"),
    [
        # Words that arrived with the end, of which the client has received only the first one.
        ("continued", 3, [event("ends", reason="length"), event("is_rejected", outcome=Outcome.FAILED)]),
        # An engine of one model cannot continue the answer, those of the next model can.
        (
            "assembled from parts",
            3,
            [
                *(steps(2), LOST, steps(3, ignores=True), LOST),
                *(event("is_rejected", outcome=Outcome.EXPIRED), steps(5), LOST, steps(9)),
            ],
        ),
        # A client reads again before the engine sends more.
        *(
            (kind, 3, [event("stops_reading"), *words, event("reads_again"), WORDS[0], steps(20)])
            for kind, words in itertools.product(STREAMS, (WORDS, WORDS[:1]))
        ),
        # An error answer after comments is an event.
        ("passed", 1, [event("waits"), event("refuses", refusal=REFUSALS[5], times=1)]),
        # Each model has two attempts for errors of its engines.
        ("assembled", 1, [*[event("refuses", refusal=FAULT, times=2), steps(1)] * 2]),
    ],
)
def test_a_life_that_chance_brings_rarely(kind: str, count: int, events: list[Event]) -> None:
    life = Life()
    life.begin(arrival(CHAT, kind, count))
    for each in events:
        happens(life, *each)
    assert life.state is ENDED
    life.teardown()


def test_an_answer_that_begins_is_not_revoked() -> None:
    life = Life()
    life.begin(arrival(CHAT, "whole", 2))
    begin = life.client.start_response

    def revoke(*rest: Any) -> None:
        life.request.on_revocation()
        begin(*rest)

    life.client.start_response = revoke  # type: ignore[method-assign]
    happens(life, "ends_whole", {})
    life.teardown()


@pytest.mark.parametrize("kind", ["passed", "assembled", "continued"])
@pytest.mark.parametrize(
    "before",
    [b": wait\n\n" * 3, {"choices": [{"index": 0, "delta": {"role": "assistant"}, "finish_reason": None}]}],
)
def test_events_before_the_first_output_are_no_tokens(kind: str, before: Any) -> None:
    life = Life()
    life.begin(arrival(CHAT, kind, 1))
    life.on_loop(life.responses[-1].arrive, before, headers=EVENTS)
    assert life.request.seen_tokens == 0
    assert "first_token" not in life.scheduler.names()
    # Nothing of the answer is lost, so another replica may serve it.
    life.on_loop(life.responses[-1].break_off, UpstreamError(DispatchFailure.LOST, "it broke"))
    assert life.scheduler.put_backs() == [DispatchFailure.LOST]
    assert life.client.pieces == []
    life.is_granted(can_continue=True)
    life.on_loop(life.responses[-1].arrive, life.next_word(None), headers=EVENTS)
    assert life.request.seen_tokens > 0
    assert "first_token" in life.scheduler.names()
    life.on_loop(life.client.disconnect)
    life.teardown()


@pytest.mark.parametrize("kind", STREAMS)
def test_gaps_of_a_stream_are_those_of_the_engine(kind: str) -> None:
    life = Life()
    life.begin(arrival(CHAT, kind, 3))
    happens(life, *event("stops_reading"))
    happens(life, *WORDS[0])
    with patch.object(path, "monotonic", lambda: time.monotonic() + 60.0):
        happens(life, *event("reads_again"))
    with patch.object(path, "monotonic", lambda: time.monotonic() + 100.0):
        # The last piece arrives together with the end.
        happens(life, *event("ends", reason="stop"))
    gap = life.scheduler.longest_gap
    assert gap is not None
    assert gap.seconds >= 100.0
    life.teardown()


@pytest.mark.parametrize("is_lost", [False, True])
def test_the_longest_gap_of_a_stream_is_that_of_its_last_replica(is_lost: bool) -> None:
    life = Life()
    life.begin(arrival(CHAT, "continued", 4))
    with patch.object(path, "monotonic", lambda: time.monotonic() + 100.0):
        happens(life, *WORDS[0])
    if is_lost:
        happens(life, *LOST)
        happens(life, *steps(3))
    happens(life, *event("ends", reason="stop"))
    assert life.state is ENDED
    gap = life.scheduler.longest_gap
    assert gap is not None
    assert (gap.seconds < 100.0) is is_lost
    life.teardown()
