"""The driver of the emulated engine: admission, steps and metrics.

- `EngineDriver`: drives the engine model in real time: begins a step, sleeps until it ends, and delivers its
  tokens.
- `Ticket`: the sequences of one HTTP request, and the event on which its handler waits.
- `ServedNames`: names of the model and of LoRA adapters.
- `OutputLengthSampler`: the lengths of answers.
- `EmulatedAdmission`: converts requests to tickets, by vLLM's context limits.
- `EngineMetrics`: the metrics of vLLM that the application or its dashboards read.

`EngineDriver`. The model's clock runs `speed_up` times as fast as wall time. A step begins when the previous
one ended on that clock, not when this process woke up, so late wake-ups do not accumulate. If the process
lags too far behind, the clock slips instead of catching up in a burst.

Request handlers hold a `Ticket`. The driver marks tickets with progress and wakes their handlers. A handler
that reads slowly finds several tokens at once.

`EngineMetrics`. Metrics are updated at every step and scraped a few times per minute. So they are plain
numbers, and Prometheus objects are created at a scrape. All times are wall time: a speed-up divides them like
the client's times.
"""

import asyncio
import bisect
import itertools
import logging
import math
import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from serve_app.engines.emulated.requests import (
    NO_ARGUMENTS,
    ApiError,
    GeneratedOutput,
    Generation,
    Prompt,
    decode,
    decoder_of,
    invalid,
    words,
)
from serve_app.engines.engine import EngineLoad
from serve_app.engines.model import (
    EngineModel,
    EngineModelSettings,
    EngineSequence,
    ModelSnapshot,
    StepOutcome,
)
from serve_app.engines.model.model import TPOT_WINDOW_S, RecentMean
from serve_app.errors import EngineError

CONTENT_TYPE = b"text/plain; version=0.0.4; charset=utf-8"

_TOKEN_GAP_S = (
    *(0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75),
    *(1, 2.5, 5, 7.5, 10, 20, 40, 80),
)
_STEP_TOKENS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
_LABELS = ("model_name", "engine")


class WeightedHistogram:
    """Histogram that counts many equal values at the cost of one."""

    __slots__ = ("_bounds", "_counts", "_sum", "documentation")

    def __init__(self, documentation: str, bounds: Sequence[float]) -> None:
        self.documentation = documentation
        self._bounds = tuple(bounds)
        self._counts = [0] * (len(self._bounds) + 1)
        self._sum = 0.0

    def observe(self, value: float, times: int = 1) -> None:
        """Count a value `times` times."""
        self._counts[bisect.bisect_left(self._bounds, value)] += times
        self._sum += value * times

    def cumulative(self) -> tuple[list[tuple[str, float]], float]:
        """Return cumulative counts by upper bound and the sum of all values, for `prometheus_client`."""
        bounds = [*(repr(float(bound)) for bound in self._bounds), "+Inf"]
        return list(zip(bounds, itertools.accumulate(self._counts), strict=True)), self._sum


class EngineMetrics(Collector):
    """Prometheus collector of one emulated engine.

    Args:
        model_name: value of the label `model_name`.
    """

    def __init__(self, model_name: str, settings: EngineModelSettings) -> None:
        self._labels = (model_name, "0")
        self._settings = settings
        self._snapshot: Callable[[], ModelSnapshot] | None = None
        self._generation_tokens = 0
        self._token_gaps = WeightedHistogram("Inter-token latency.", _TOKEN_GAP_S)
        self._step_tokens = WeightedHistogram("Tokens per engine step.", _STEP_TOKENS)
        self._registry = CollectorRegistry(auto_describe=False)
        self._registry.register(self)

    def watch(self, snapshot: Callable[[], ModelSnapshot]) -> None:
        """Set the source of the gauges."""
        self._snapshot = snapshot

    def text(self) -> bytes:
        """Return the metrics in the Prometheus text format."""
        return generate_latest(self._registry)

    def count_step(self, outcome: StepOutcome, gap_s: float) -> None:
        """Count a step that ended `gap_s` after the previous one."""
        self._step_tokens.observe(outcome.prefill_tokens + outcome.sequences)
        if outcome.sequences:
            self._token_gaps.observe(gap_s, outcome.sequences)
        self._generation_tokens += outcome.sequences + len(outcome.first_tokens)

    def collect(self) -> Iterable[Metric]:
        """Return all metrics, for the registry."""
        if self._snapshot is not None:
            snapshot = self._snapshot()
            yield from self._gauges(snapshot)
            yield from self._counters(snapshot)
        for name, histogram in (
            ("inter_token_latency_seconds", self._token_gaps),
            ("iteration_tokens_total", self._step_tokens),
        ):
            buckets, total = histogram.cumulative()
            family = HistogramMetricFamily(f"vllm:{name}", histogram.documentation, labels=_LABELS)
            family.add_metric(self._labels, buckets, total)
            yield family

    def _gauges(self, snapshot: ModelSnapshot) -> Iterable[Metric]:
        for name, documentation, value in (
            ("num_requests_running", "Requests in model execution batches.", snapshot.running),
            ("num_requests_waiting", "Requests waiting to be processed.", snapshot.waiting),
            ("kv_cache_usage_perc", "KV-cache usage. 1 means 100 percent usage.", snapshot.kv_usage_ratio),
        ):
            yield self._family(GaugeMetricFamily, name, documentation, value)
        cache = GaugeMetricFamily(
            "vllm:cache_config_info",
            "Information of the LLMEngine CacheConfig",
            labels=["block_size", "enable_prefix_caching", "engine", "num_gpu_blocks"],
        )
        settings = self._settings
        # vLLM's count includes the block that it reserves as padding. All blocks of the emulated engine are
        # usable.
        blocks = str(settings.kv_blocks + 1)
        cache.add_metric([str(settings.block_size), str(settings.prefix_caching), "0", blocks], 1)
        yield cache

    def _counters(self, snapshot: ModelSnapshot) -> Iterable[Metric]:
        for name, documentation, value in (
            ("num_preemptions", "Preemptions.", snapshot.preemptions),
            ("prefix_cache_queries", "Tokens looked up in the prefix cache.", snapshot.prefix_queries_tokens),
            ("prefix_cache_hits", "Tokens found in the prefix cache.", snapshot.prefix_hits_tokens),
            ("generation_tokens", "Generation tokens processed.", self._generation_tokens),
        ):
            yield self._family(CounterMetricFamily, name, documentation, value)

    def _family(
        self,
        kind: type[GaugeMetricFamily] | type[CounterMetricFamily],
        name: str,
        documentation: str,
        value: float,
    ) -> Metric:
        family = kind(f"vllm:{name}", documentation, labels=_LABELS)
        family.add_metric(self._labels, value)
        return family


_log = logging.getLogger(__name__)

# Maximum lag, in wall time, that is caught up. Beyond it, the engine is slower than its profile.
_MAX_LAG_S = 0.1


class Ticket:
    """The sequences of one HTTP request, and the event on which its handler waits.

    Attributes:
        sequences: one per choice, in order.
        outputs: answer of each sequence; empty if none is generated.
        streaming: wake the handler at every token, not only at the end.
        abandoned: whether the client has disconnected.
    """

    __slots__ = (
        "_failure",
        "_progressed",
        "_unfinished",
        "_waiter",
        "abandoned",
        "outputs",
        "sequences",
        "streaming",
    )

    def __init__(
        self,
        sequences: Sequence[EngineSequence],
        outputs: Sequence[GeneratedOutput] = (),
        *,
        streaming: bool = False,
    ) -> None:
        self.sequences = sequences
        self.outputs = outputs
        self.streaming = streaming
        self.abandoned = False
        self._unfinished = len(sequences)
        self._failure: Exception | None = None
        self._progressed = False
        self._waiter: asyncio.Future[None] | None = None

    @property
    def is_done(self) -> bool:
        """True if all sequences have finished."""
        return self._unfinished == 0

    async def progress(self) -> None:
        """Wait for new tokens of a stream, the end, or a disconnected client.

        Raises:
            EngineError: the engine has stopped.
        """
        if not self._progressed:
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        self._progressed = False
        if self._failure is not None:
            raise EngineError("the emulated engine has stopped") from self._failure

    def notify(self) -> None:
        """Notify the handler of progress."""
        self._progressed = True
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def count_finished(self) -> None:
        """Count one more finished sequence."""
        self._unfinished -= 1
        if self.streaming or not self._unfinished:
            self.notify()

    def abandon(self) -> None:
        """Stop the handler, because its client has disconnected."""
        self.abandoned = True
        self.notify()

    def fail(self, failure: Exception) -> None:
        """Raise an error in the handler, because the engine has stopped."""
        self._failure = failure
        self.notify()


class EngineDriver:
    """Owner of the engine model and its clock.

    Args:
        metrics: counters of steps.
        speed_up: seconds of the model's clock per second of wall time.
    """

    def __init__(self, model: EngineModel, metrics: EngineMetrics, speed_up: float) -> None:
        self._model = model
        self._metrics = metrics
        self._speed_up = speed_up
        self._tickets: dict[EngineSequence, Ticket] = {}
        self._work = asyncio.Event()
        self._token_gaps = 0
        self._token_gaps_s = 0.0
        self._tpot = RecentMean(TPOT_WINDOW_S)
        self._task: asyncio.Task[None] | None = None
        self._clock: Callable[[], float] | None = None
        self._started_at = 0.0

    def __repr__(self) -> str:
        return f"<EngineDriver open={len(self._tickets)} {self._model!r}>"

    def start(self) -> None:
        """Start the task. Requires a running event loop."""
        loop = asyncio.get_running_loop()
        self._clock = loop.time
        self._started_at = loop.time()
        self._tpot.record(0.0, 0, loop.time())
        self._task = loop.create_task(self._run(), name="emulated-engine")

    async def stop(self) -> None:
        """Stop the task and fail unfinished requests."""
        if self._task is None:
            return
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)
        self._fail_all(EngineError("the engine was stopped"))

    def check(self) -> None:
        """Raise `EngineError` if the task is not running."""
        if self._task is None:
            raise EngineError("the emulated engine has not been started")
        if self._task.done():
            raise EngineError("the emulated engine has stopped")

    def now(self) -> float:
        """Return the time on the model's clock in seconds."""
        assert self._clock is not None, "the driver has not been started"
        return (self._clock() - self._started_at) * self._speed_up

    def submit(self, ticket: Ticket) -> None:
        """Add a ticket's sequences to the engine.

        Raises:
            EngineError: the engine has stopped.
        """
        self.check()
        now = self.now()
        for sequence in ticket.sequences:
            self._tickets[sequence] = ticket
            self._model.add(sequence, now)
        self._work.set()

    def close(self, ticket: Ticket) -> None:
        """Abort the unfinished sequences of a ticket. Idempotent; allowed at any time."""
        for sequence in ticket.sequences:
            if self._tickets.pop(sequence, None) is not None:
                self._model.abort(sequence, self.now())

    def output_tokens(self, sequence: EngineSequence) -> int:
        """Return the number of tokens that a sequence has generated so far."""
        return self._model.output_tokens(sequence)

    def snapshot(self) -> ModelSnapshot:
        """Return the engine's current counts."""
        return self._model.snapshot(self.now())

    def load(self) -> EngineLoad:
        """Return the engine's load; `tpot_s` is wall time, so a speed-up divides it."""
        assert self._clock is not None, "the driver has not been started"
        snapshot = self.snapshot()
        return EngineLoad(
            waiting=snapshot.waiting,
            running=snapshot.running,
            kv_usage_ratio=snapshot.kv_usage_ratio,
            tpot_s=self._tpot.mean(self._clock()),
        )

    async def _run(self) -> None:
        try:
            await self._run_steps()
        except Exception as error:
            _log.exception("the emulated engine has stopped: %r", self)
            self._fail_all(error)
            raise

    async def _run_steps(self) -> None:
        begin_at = self.now()
        began_at = begin_at
        while True:
            ends_at = self._model.begin_step(begin_at)
            if ends_at is None:
                self._work.clear()
                await self._work.wait()
                begin_at = began_at = self.now()
                continue
            # Even a sleep of zero seconds lets the handlers run between steps.
            await asyncio.sleep(max(0.0, (ends_at - self.now()) / self._speed_up))
            outcome = self._model.end_step()
            woke_at = self.now()
            self._deliver(outcome, (woke_at - began_at) / self._speed_up)
            began_at = woke_at
            begin_at = max(ends_at, woke_at - _MAX_LAG_S * self._speed_up)

    def _deliver(self, outcome: StepOutcome, gap_s: float) -> None:
        """Wake the handlers of sequences with a new token, `gap_s` of wall time after their previous one."""
        assert self._clock is not None, "the driver has not been started"
        self._token_gaps += outcome.sequences
        self._token_gaps_s += outcome.sequences * gap_s
        self._tpot.record(self._token_gaps_s, self._token_gaps, self._clock())
        self._metrics.count_step(outcome, gap_s)
        tickets = self._tickets
        for sequence in self._model.decoding:
            ticket = tickets[sequence]
            if ticket.streaming:
                ticket.notify()
        for sequence in outcome.finished:
            tickets.pop(sequence).count_finished()

    def _fail_all(self, error: Exception) -> None:
        for ticket in set(self._tickets.values()):
            ticket.fail(error)
        self._tickets.clear()


class _Adapter(msgspec.Struct):
    lora_name: str


_ADAPTER = decoder_of(_Adapter)


class ServedNames:
    """Names that the engine serves: those of its model and of LoRA adapters.

    Args:
        models: names of the model; answers carry the first.
        adapters: names of the adapters loaded at startup.
    """

    def __init__(self, models: tuple[str, ...], adapters: tuple[str, ...]) -> None:
        self._models = models
        self._adapters = dict.fromkeys(adapters)

    def __repr__(self) -> str:
        return f"<ServedNames {', '.join((*self._models, *self._adapters))}>"

    @property
    def adapters(self) -> tuple[str, ...]:
        """Names of the loaded adapters, sorted."""
        return tuple(sorted(self._adapters))

    def check(self, model: str | None) -> str:
        """Return the requested name, by default the model's. Raise `ApiError` if it is not served."""
        if model and model not in self._models and model not in self._adapters:
            names = ", ".join((*self._models, *self._adapters))
            message = f"The model `{model}` does not exist. Valid aliases: {names}."
            raise ApiError(404, message, kind="NotFoundError", param="model")
        return model or self._models[0]

    def load(self, body: bytes) -> None:
        """Load the adapter that a request names."""
        self._adapters[decode(_ADAPTER, body).lora_name] = None

    def unload(self, body: bytes) -> None:
        """Unload the adapter that a request names."""
        self._adapters.pop(decode(_ADAPTER, body).lora_name, None)

    def cards(self, created: int, max_model_len: int) -> list[dict[str, Any]]:
        """Return the entries of the model list. Adapters have their base model as `parent`."""
        own = self._models[0]
        common = {"object": "model", "created": created, "owned_by": "emulated", "permission": []}
        models = [
            {"id": name, **common, "root": own, "parent": None, "max_model_len": max_model_len}
            for name in self._models
        ]
        return models + [
            {"id": name, **common, "root": f"adapters/{name}", "parent": own, "max_model_len": None}
            for name in self._adapters
        ]


class OutputLengthSampler:
    """Source of answer lengths: stated by the client, or sampled from a log-normal distribution.

    Args:
        mean_tokens: mean of the distribution before limits are applied.
        sigma: standard deviation of the logarithm; 0 makes every answer `mean_tokens` long.
    """

    def __init__(self, mean_tokens: float, sigma: float, rng: random.Random) -> None:
        self._mu = math.log(mean_tokens) - sigma * sigma / 2.0
        self._sigma = sigma
        self._rng = rng

    def draw(self, generation: Generation, limit: int) -> tuple[int, str]:
        """Return the tokens of one answer, at most `limit`, and its finish reason."""
        if generation.body.ignore_eos:
            return limit, "length"
        tokens = generation.body.ewsjf_output_tokens
        if tokens is None:
            tokens = max(1, round(self._rng.lognormvariate(self._mu, self._sigma)))
        return (limit, "length") if tokens > limit else (tokens, "stop")


@dataclass(frozen=True, slots=True, kw_only=True)
class EmulatedAdmission:
    """Admission control of the engine: converts requests to tickets, or rejects them with `ApiError`."""

    limits: EngineModelSettings
    driver: EngineDriver
    lengths: OutputLengthSampler

    def admit(self, generation: Generation, request_id: str) -> Ticket:
        """Return a ticket with one sequence per choice of each prompt."""
        most = self.limits.max_model_len
        if generation.max_tokens is not None and generation.max_tokens > most:
            raise invalid(
                f"max_tokens={generation.max_tokens} cannot be greater than max_model_len={most}. Please "
                "request fewer output tokens.",
                param="max_tokens",
            )
        limits = [self._output_limit(generation, prompt) for prompt in generation.prompts]
        sequences: list[EngineSequence] = []
        outputs: list[GeneratedOutput] = []
        for prompt, limit in zip(generation.prompts, limits, strict=True):
            for choice in range(generation.choices):
                if generation.call is None:
                    output = words(prompt, choice, *self.lengths.draw(generation, limit))
                else:
                    output = NO_ARGUMENTS
                outputs.append(output)
                sequence_id, tokens = f"{request_id}-{len(sequences)}", len(output.tokens)
                sequences.append(self._sequence(sequence_id, prompt, tokens, generation.body.priority))
        return Ticket(sequences, outputs, streaming=bool(generation.body.stream))

    def admit_embeddings(self, prompts: list[Prompt], priority: int, request_id: str) -> Ticket:
        """Return a ticket whose sequences compute their prompts and generate nothing."""
        for prompt in prompts:
            self._check_prompt(prompt)
        sequences = [
            self._sequence(f"{request_id}-{index}", prompt, 0, priority)
            for index, prompt in enumerate(prompts)
        ]
        return Ticket(sequences)

    def _output_limit(self, generation: Generation, prompt: Prompt) -> int:
        """Return the maximum output tokens: `max_tokens` or the rest of the context, whichever is smaller."""
        self._check_prompt(prompt)
        left = self.limits.max_model_len - prompt.tokens
        if not left:
            raise invalid(
                f"The decoder prompt (length {prompt.tokens}) plus the number of requested output tokens (at "
                f"least 1) is longer than the maximum model length of {prompt.tokens}."
            )
        return left if generation.max_tokens is None else min(left, generation.max_tokens)

    def _check_prompt(self, prompt: Prompt) -> None:
        if prompt.tokens > self.limits.max_model_len:
            raise invalid(
                f"This model's maximum context length is {self.limits.max_model_len} tokens. However, your "
                f"prompt contains {prompt.tokens} input tokens. Please reduce its length.",
                param="input_tokens",
            )

    def _sequence(
        self, sequence_id: str, prompt: Prompt, target_tokens: int, priority: int
    ) -> EngineSequence:
        return EngineSequence(
            sequence_id=sequence_id,
            prompt_tokens=prompt.tokens,
            target_tokens=target_tokens,
            arrived_at=self.driver.now(),
            priority=priority,
            block_hashes=prompt.block_hashes,
        )
