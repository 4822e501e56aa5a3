"""Shared types: a request before and after it is served, and the limits of its API key.

A submission and its parts are msgspec structs. Each request creates, encodes and decodes them, which takes a
multiple of the time with dataclasses. `gc=False`, because none can be part of a reference cycle.
"""

import enum
import math
from collections.abc import Container, Iterator
from dataclasses import dataclass
from typing import NamedTuple

import msgspec


class KeyLimits(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """Limits of one API key, each per model; None for no limit.

    Attributes:
        requests_per_minute: maximum number of requests admitted in any 60 s.
        tokens_per_minute: maximum number of prompt and output tokens admitted in any 60 s.
        concurrent: maximum number of queued and running requests.
        queued: maximum number of queued requests.
    """

    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None
    concurrent: int | None = None
    queued: int | None = None


MIN_WEIGHT, MAX_WEIGHT = 1e-6, 1e6
MIN_FLOOR, MAX_FLOOR = 1e-3, 1e9
"""Range of the fair-share weight of a tenant. Beyond it, its counter could exceed what a float can hold."""


MAX_TARGET_S = 86_400.0
"""Maximum of a latency limit, in seconds."""


class LatencyTarget(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """Latency limits that a request states, in seconds; None for no limit.

    Attributes:
        ttft_s: from its arrival to its first token.
        tpot_s: time per output token after the first.
        refuse: whether to reject it on arrival if it is expected to miss one of them.
    """

    ttft_s: float | None = None
    tpot_s: float | None = None
    refuse: bool = False


def completed(target: LatencyTarget | None, by: LatencyTarget | None) -> LatencyTarget | None:
    """Return a target with the limits of another one that it lacks; None if there is neither."""
    if target is None or by is None:
        return target or by
    return LatencyTarget(
        ttft_s=by.ttft_s if target.ttft_s is None else target.ttft_s,
        tpot_s=by.tpot_s if target.tpot_s is None else target.tpot_s,
        refuse=target.refuse or by.refuse,
    )


class KeyTerms(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """The parts of an API key that a scheduler needs. They are sent with each request of the key.

    Attributes:
        key_id: name of the key in limits and usage records; not secret.
        weight: fair-share weight of the request's tenant; None to use `fairness.weights`.
        floor_tokens_per_s: floor of the request's tenant; None to use `floors.tenants`.
        target: latency target of its requests that state none. Limits that it lacks are those of the class.
    """

    key_id: str
    weight: float | None = None
    limits: KeyLimits = KeyLimits()
    target: LatencyTarget | None = None
    floor_tokens_per_s: float | None = None


@dataclass(frozen=True, slots=True)
class LimitStatus:
    """The status of one limit per minute.

    Attributes:
        remaining: amount that may still be admitted now.
        reset_s: seconds until the whole limit is available again without further requests.
    """

    limit: int
    remaining: int
    reset_s: float


@dataclass(frozen=True, slots=True)
class RateLimitStatus:
    """The status of a key's limits per minute; None for a limit that it does not have."""

    requests: LimitStatus | None = None
    tokens: LimitStatus | None = None


class PriorityClass(enum.StrEnum):
    """Priority class of a request; `rank` orders the classes, 0 first."""

    INTERACTIVE = "interactive"
    DEFAULT = "default"
    BATCH = "batch"

    @property
    def rank(self) -> int:
        """Position in the order of service between classes; 0 is served first."""
        return _RANKS[self]


_RANKS = {PriorityClass.INTERACTIVE: 0, PriorityClass.DEFAULT: 1, PriorityClass.BATCH: 2}


class TextCategory(enum.StrEnum):
    """Kind of a prompt's text, by which the error of its estimated length and answers are learned.

    CJK is text whose bytes are mostly not ASCII, NUMERIC digits and encoded bytes (base64, hex), CODE ASCII
    with many brackets and operators, MIXED what is between the others, and PROSE the rest.
    """

    PROSE = "prose"
    CODE = "code"
    CJK = "cjk"
    NUMERIC = "numeric"
    MIXED = "mixed"


class Destination(NamedTuple):
    """The replicas of its pools that can serve a request.

    Attributes:
        replica_id: the only replica with the state that the request refers to; None for any.
        adapter: the LoRA adapter that a replica must list; None for none.
    """

    replica_id: str | None = None
    adapter: str | None = None

    def admits(self, replica_id: str, adapters: Container[str]) -> bool:
        """Return whether a replica with these adapters can serve the request."""
        return self.replica_id in (None, replica_id) and (self.adapter is None or self.adapter in adapters)


ANYWHERE = Destination()


class PromptShape(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """The size of a prompt as the gateway measures it without a tokenizer.

    Attributes:
        text_bytes: UTF-8 bytes of the text that the model reads, without tool definitions and media.
        byte_classes: the same by class, as `byte_classes.measure_text` counts them; empty if unknown.
        messages: number of chat messages; 0 for a plain completion or an embedding.
        tool_bytes: UTF-8 bytes of tool definitions and response schemas.
        media_items: images, audio clips and other media; their bytes are not text.
        prompt_tokens: exact length; only known if the client sent token ids.
        prompts: independent prompts in this request (batched completions, embeddings). All sizes above are
            sums over them, while a context limit applies to each of them separately.
    """

    text_bytes: int
    category: TextCategory = TextCategory.PROSE
    messages: int = 0
    tool_bytes: int = 0
    media_items: int = 0
    prompt_tokens: int | None = None
    prompts: int = 1
    byte_classes: tuple[int, ...] = ()


class RequestSpec(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """The requirements of a request for an engine, read from its body.

    Attributes:
        adapter: the name that the client used, if it is a LoRA adapter of the model.
        max_output_tokens: the client's limit per choice; None if it set none, 0 if nothing is generated
            (embeddings).
        choices: sequences that the engine generates: `n` for each prompt.
        streamed: whether its answer is streamed, so that its first token is observable.
    """

    model: str
    shape: PromptShape
    max_output_tokens: int | None = None
    choices: int = 1
    streamed: bool = True
    adapter: str | None = None

    @property
    def served_name(self) -> str:
        """Name under which engines serve the request: the adapter's or the model's."""
        return self.adapter or self.model


class ProgramHint(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """The ids by which a client states the agent program of a request.

    Attributes:
        session: the conversation. Some clients use one id for an agent and its sub-agents.
        program: the whole program; None if the client states no separate id for it.
        parent: the session of the agent that launched this one; None if the client states none.
    """

    session: str
    program: str | None = None
    parent: str | None = None


class Submission(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """A request as a gateway submits it to the scheduler.

    Attributes:
        request_id: unique among all gateways of a model; assigned by the gateway, not the client's header.
        queue_timeout_s: maximum queue time from its arrival, in seconds; None for the default of its class.
        no_wait: whether to reject it instead of queueing (`x-queue: no-wait`).
        prefix: hashes of the prompt's leading blocks, longest last, for prefix affinity.
        key: terms of its API key; None if it needed none.
        bound_to: the only replica that can serve it, because it has the state that the request refers to;
            None for any.
        program: the client's statement about its agent program; None if it made none.
        revocable: whether its gateway can stop it on its replica and queue it again, unnoticed by the client.
        target: its latency target. Limits that it lacks are those of its key, then of its class.
    """

    request_id: str
    spec: RequestSpec
    tenant: str = "default"
    priority: PriorityClass = PriorityClass.DEFAULT
    queue_timeout_s: float | None = None
    no_wait: bool = False
    prefix: tuple[int, ...] = ()
    key: KeyTerms | None = None
    bound_to: str | None = None
    program: ProgramHint | None = None
    revocable: bool = False
    target: LatencyTarget | None = None


class _Shortcuts:
    """Fields of a submission that the core reads dozens of times per request: faster than properties."""

    __slots__ = ("priority", "request_id", "shape", "spec", "tenant")

    submission: Submission

    def __post_init__(self) -> None:
        submission = self.submission
        self.request_id, self.tenant = submission.request_id, submission.tenant
        self.priority, self.spec = submission.priority, submission.spec
        self.shape = submission.spec.shape


# Not frozen, because creation of a frozen one takes twice as long. Immutable by convention.
@dataclass(slots=True, kw_only=True)
class Request(_Shortcuts):
    """A submission on the scheduler's clock. All times are seconds on that clock.

    Attributes:
        gateway_id: the gateway that holds the client's connection.
        expires_at: end of its queue timeout.
        attempts: number of earlier dispatches (whose replica was lost or rejected it).
        lost: whether the last of these dispatches ended with the loss of its replica.
        client_request_id: id chosen by the client, for receipts; empty for none.
        grants: number of grants, including those of earlier schedulers, for the sessions with gateways.
    """

    submission: Submission
    gateway_id: str
    arrived_at: float
    expires_at: float = math.inf
    attempts: int = 0
    lost: bool = False
    client_request_id: str = ""
    grants: int = 0

    @property
    def bound_to(self) -> str | None:
        """The only replica that can serve it; None for any."""
        return self.submission.bound_to

    @property
    def destination(self) -> Destination:
        """The replicas of its pools that can serve it."""
        bound_to, adapter = self.submission.bound_to, self.submission.spec.adapter
        return ANYWHERE if bound_to is None and adapter is None else Destination(bound_to, adapter)


class TurnEnd(enum.StrEnum):
    """The end of an answer, as far as it predicts the next request of the same program."""

    TOOLS = "tools"
    """With calls of tools (`tool_calls`, `tool_use`), whose results are the next prompt."""
    DONE = "done"
    """By itself (`stop`, `end_turn`)."""
    OTHER = "other"
    """At a limit, or by a filter."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """Token counts as the engine reports them in its answer, and how the answer ended.

    Attributes:
        reasoning_tokens: those of the output that are no part of the answer's text.
        ending: None if the answer does not state it.
    """

    prompt_tokens: int
    output_tokens: int
    cached_tokens: int = 0
    ending: TurnEnd | None = None
    reasoning_tokens: int = 0


class EngineTimes(NamedTuple):
    """Stage times of a request inside an engine, in seconds; None for those it does not report.

    Attributes:
        queue_s: wait in the engine's queue.
        prefill_s: from the end of that wait to the first token.
        generation_s: from the first token to the last.
    """

    queue_s: float | None = None
    prefill_s: float | None = None
    generation_s: float | None = None


class RequestTimes(NamedTuple):
    """Stage times of a request at its gateway, in seconds, for its receipt.

    Attributes:
        endpoint: path of the request.
        read_s: from arrival to the first submission.
        grant_s: from the last submission to the last grant, or to the end without one.
        first_token_s: from the grant to the first token; None if the answer is not streamed. Negative if the
            client has received it by an earlier grant.
        engine_s: from the grant to the end in the engine; None if the request ended in the queue.
        engine: the engine's own times; None if it reports none.
        earlier_s: from the first submission to the last, which is to another model of its route.
    """

    endpoint: str
    read_s: float
    grant_s: float
    first_token_s: float | None
    engine_s: float | None
    engine: EngineTimes | None = None
    earlier_s: float = 0.0

    def tpot_s(self, output_tokens: int) -> float | None:
        """Return the time per output token after the first; None if it is unknown."""
        if self.first_token_s is None or self.engine_s is None or output_tokens < 2:
            return None
        return (self.engine_s - self.first_token_s) / (output_tokens - 1)

    def stages(self, wait_s: float) -> Iterator[tuple[str, float]]:
        """Yield its stages; see the function `stages`."""
        return stages(
            wait_s,
            read_s=self.read_s,
            earlier_s=self.earlier_s,
            grant_s=self.grant_s,
            first_token_s=self.first_token_s,
            engine_s=self.engine_s,
        )


class DecodeGap(NamedTuple):
    """The longest gap between two pieces of a streamed answer, as received from the engine, in seconds.

    Attributes:
        ended_ago_s: time from its end to the end of the request.
    """

    seconds: float
    ended_ago_s: float


def stages(
    wait_s: float,
    *,
    read_s: float | None = None,
    earlier_s: float = 0.0,
    grant_s: float | None = None,
    first_token_s: float | None = None,
    engine_s: float | None = None,
) -> Iterator[tuple[str, float]]:
    """Yield the known stages of a request with their seconds, in order.

    They add up to the time since arrival at the gateway.

    Args:
        wait_s: time in the queue, measured by the scheduler.
        read_s, earlier_s, grant_s, first_token_s, engine_s: as in `RequestTimes`; None if unknown or not
            over. With a first token by an earlier grant, the last engine's time is one stage.
    """
    if read_s is not None and grant_s is not None:
        yield "gateway", read_s
        if earlier_s:
            yield "earlier_models", earlier_s
        yield "channel", grant_s - wait_s
    yield "queue", wait_s
    if first_token_s is not None and first_token_s >= 0:
        yield "until_first_token", first_token_s
        if engine_s is not None:
            yield "generation", engine_s - first_token_s
    elif engine_s is not None:
        yield "engine", engine_s
