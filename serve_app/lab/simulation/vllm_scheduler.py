"""vLLM's own scheduler on a clock that jumps, behind what a simulation uses of the engine model.

`VllmModel` drives the objects that schedule in a vLLM server: `Scheduler` or `AsyncScheduler`, with its KV
cache manager and prefix cache. They are built from vLLM's own engine arguments. Nothing is computed: a step
takes the time that `StepTimeModel` gives for vLLM's batch, and tokens are made up.

- Steps: `begin_step` and `end_step` are the two halves of `EngineCore.step`. With asynchronous scheduling,
  they are those of `EngineCore.step_with_batch_queue`: a batch is scheduled when the one before it begins. A
  request that arrives during a step therefore waits for the end of the next one as well.
- Tokens: a block of tokens repeats its hash, so equal `block_hashes` are equal blocks, and vLLM hashes them
  itself. Tokens without a hash are unique to their sequence. A sequence ends after `target_tokens`, as
  `max_tokens`.
- KV cache: vLLM reserves one block as a placeholder. It is added here, so that `kv_tokens` can be used in
  full.

It is several times slower than `EngineModel`, because vLLM handles each sequence in each step: `max_steps`
has no effect.
"""

import itertools
import json
import os
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from serve_app.engines.model.model import (
    EngineModelSettings,
    EngineSequence,
    ModelSnapshot,
    SequenceState,
    StepOutcome,
)
from serve_app.engines.model.step_time import StepTimeModel
from serve_app.engines.vllm.library import from_vllm

# Sizes of a model only matter where weights are loaded.
_MODEL = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "torch_dtype": "bfloat16"}
# The executor passes tokens on as signed numbers of 64 bits.
_TOKEN_MASK = (1 << 63) - 1


@dataclass(slots=True)
class _Step:
    """A scheduled batch: vLLM's description of it, its result, and its work (arguments of `step_s`)."""

    scheduled: Any
    result: Any
    work: dict[str, int]
    preempted: list[EngineSequence]


class VllmModel:
    """vLLM's scheduler over its paged KV cache.

    Args:
        asynchronous: whether the next batch is scheduled while one runs (vLLM's `--async-scheduling`).

    Raises:
        EngineError: vLLM is missing, or its release is not supported.
    """

    def __init__(
        self, settings: EngineModelSettings, step_time: StepTimeModel, *, asynchronous: bool = False
    ) -> None:
        self.settings = settings
        self.step_time = step_time
        self._asynchronous = asynchronous
        # vLLM configures its log when it is imported. Warnings are about weights and hardware.
        os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
        config = _config(settings, asynchronous=asynchronous)
        self._scheduler = _scheduler(config, settings)
        self._hash_of = from_vllm("get_hash_fn_by_name")(config.cache_config.prefix_caching_hash_algo)
        self._block_hasher = None
        if settings.prefix_caching:
            from_vllm("init_none_hash")(self._hash_of)
            self._block_hasher = from_vllm("get_request_block_hasher")(settings.block_size, self._hash_of)
        # Imported here because it imports vLLM.
        from serve_app.engines.vllm.timed import Sequences  # noqa: PLC0415 - see above

        self._sequences: Any = Sequences()
        self._make_request, self._make_params = from_vllm("Request"), from_vllm("SamplingParams")
        self._aborted = from_vllm("RequestStatus").FINISHED_ABORTED
        self._numbers = itertools.count()
        # Sequences in the engine, by the ID of their request.
        self._by_id: dict[str, EngineSequence] = {}
        self._step: _Step | None = None
        self._next: _Step | None = None
        self._ends_at: float | None = None
        self._duration_s = 0.0
        self._iterations = self._preemptions = self._token_gaps = 0
        self._token_gaps_s = 0.0
        self._prefix_queries_tokens = self._prefix_hits_tokens = 0

    def __repr__(self) -> str:
        running, waiting = self._scheduler.get_request_counts()
        return f"<VllmModel waiting={waiting} running={running} asynchronous={self._asynchronous}>"

    @property
    def ends_at(self) -> float | None:
        """End of the current step; None between steps."""
        return self._ends_at

    def add(self, sequence: EngineSequence, now: float) -> None:  # noqa: ARG002 - of the engine's interface
        """Queue a new sequence.

        Raises:
            ValueError: the sequence was added before, or exceeds the context limit.
        """
        sequence.check(self.settings.max_model_len)
        total = sequence.prompt_tokens + max(1, sequence.target_tokens)
        sequence.number = next(self._numbers)
        sequence.state = SequenceState.WAITING
        tokens = self._tokens(sequence, total)
        request_id = _request_id(sequence)
        self._by_id[request_id] = sequence
        self._scheduler.add_request(
            self._make_request(
                request_id,
                tokens[: sequence.prompt_tokens],
                # `Sequences` hands these back when it produces a token.
                self._make_params(
                    max_tokens=total - sequence.prompt_tokens, ignore_eos=True, extra_args={"tokens": tokens}
                ),
                None,
                arrival_time=sequence.arrived_at,
                priority=sequence.priority,
                block_hasher=self._block_hasher,
            )
        )

    def abort(self, sequence: EngineSequence, now: float) -> bool:  # noqa: ARG002 - of the engine's interface
        """Remove a sequence and free its blocks immediately. Return False if it had already ended."""
        if self._by_id.get(_request_id(sequence)) is not sequence:
            return False
        self._scheduler.finish_requests(_request_id(sequence), self._aborted)
        self._conclude(sequence, SequenceState.ABORTED)
        return True

    def begin_step(self, now: float, *, max_steps: int = 1) -> float | None:  # noqa: ARG002 - see the module
        """Begin a step. Return its end, or None if idle."""
        if self._step is not None:
            raise RuntimeError(f"a step is in progress until {self._ends_at}: end it first")
        step, self._next = self._next, None
        preempted: list[EngineSequence] = []
        while step is None or not step.scheduled.total_num_scheduled_tokens:
            # An empty batch takes no time. It is scheduled if the tokens of the step before are not known
            # yet, or if all running sequences were preempted.
            if step is not None:
                self._scheduler.update_from_output(step.scheduled, step.result)
                preempted += step.preempted
            if not self._by_id:
                return None
            is_stuck = step is not None and not step.preempted and not self._asynchronous
            if is_stuck:
                raise RuntimeError(f"no waiting sequence fits into an empty engine: {self!r}")
            step = self._schedule(now)
        step.preempted[:0] = preempted
        self._step = step
        self._duration_s = self.step_time.step_s(**step.work)
        self._ends_at = now + self._duration_s
        if self._asynchronous and self._by_id:
            self._next = self._schedule(now)
        return self._ends_at

    def end_step(self) -> StepOutcome:
        """Complete the step at `ends_at`."""
        step, ended_at = self._step, self._ends_at
        if step is None or ended_at is None:
            raise RuntimeError("no step is in progress: begin one first")
        self._step = self._ends_at = None
        self._iterations += 1
        self._token_gaps += step.work["sequences"]
        self._token_gaps_s += step.work["sequences"] * self._duration_s
        work = step.work
        outcome = StepOutcome(ended_at, work["prefill_tokens"], work["sequences"], preempted=step.preempted)
        for produced in self._scheduler.update_from_output(step.scheduled, step.result).values():
            for output in produced.outputs:
                self._produce(output, outcome)
        return outcome

    def cached_blocks(self, block_hashes: Sequence[int]) -> int:
        """Return the number of leading blocks that are in the prefix cache."""
        pool, hash_block = self._scheduler.kv_cache_manager.block_pool, from_vllm("hash_block_tokens")
        size, found, name = self.settings.block_size, 0, None
        for block_hash in block_hashes:
            name = hash_block(self._hash_of, name, [block_hash & _TOKEN_MASK] * size)
            if not pool.get_cached_block(name, [0]):
                break
            found += 1
        return found

    def output_tokens(self, sequence: EngineSequence) -> int:
        """Return the tokens that a sequence has generated so far."""
        return sequence.output_tokens

    def snapshot(self, now: float) -> ModelSnapshot:  # noqa: ARG002 - of the engine's interface
        """Return the current counts."""
        running, waiting = self._scheduler.get_request_counts()
        return ModelSnapshot(
            waiting=waiting,
            running=running,
            kv_usage_ratio=self._scheduler.get_kv_cache_usage(),
            preemptions=self._preemptions,
            prefix_queries_tokens=self._prefix_queries_tokens,
            prefix_hits_tokens=self._prefix_hits_tokens,
            iterations=self._iterations,
            token_gaps=self._token_gaps,
            token_gaps_s=self._token_gaps_s,
        )

    # -- one step ---------------------------------------------------------------------------------------

    def _schedule(self, now: float) -> _Step:
        scheduled = self._scheduler.schedule()
        work = self._sequences.advance(scheduled)
        for new in scheduled.scheduled_new_reqs:
            self._start(self._by_id[new.req_id], new.num_computed_tokens, now)
        preempted = sorted(
            map(self._by_id.__getitem__, scheduled.preempted_req_ids), key=lambda one: one.number
        )
        for sequence in preempted:
            sequence.state = SequenceState.WAITING
            sequence.preemptions += 1
        self._preemptions += len(preempted)
        result = self._sequences.sample(list(scheduled.num_scheduled_tokens), _GivenTokens, {})
        return _Step(scheduled, result, work, preempted)

    def _start(self, sequence: EngineSequence, cached_tokens: int, now: float) -> None:
        sequence.state = SequenceState.PREFILLING
        if sequence.scheduled_at is not None:
            return
        sequence.scheduled_at = now
        sequence.cached_tokens = cached_tokens
        if self._block_hasher is not None:
            self._prefix_queries_tokens += sequence.prompt_tokens
            self._prefix_hits_tokens += cached_tokens

    def _produce(self, output: Any, outcome: StepOutcome) -> None:
        """Record the token of one sequence."""
        sequence = self._by_id[output.request_id]
        if sequence.target_tokens:
            sequence.output_tokens += len(output.new_token_ids)
            if sequence.first_token_at is None:
                sequence.first_token_at = outcome.ended_at
                outcome.first_tokens.append(sequence)
        if output.finish_reason is not None:
            sequence.finished_at = outcome.ended_at
            outcome.finished.append(sequence)
            self._conclude(sequence, SequenceState.FINISHED)
        elif sequence.state is not SequenceState.WAITING:
            sequence.state = SequenceState.DECODING

    def _conclude(self, sequence: EngineSequence, state: SequenceState) -> None:
        del self._by_id[_request_id(sequence)]
        sequence.state = state

    def _tokens(self, sequence: EngineSequence, total: int) -> list[int]:
        """Return the tokens of the prompt and the answer."""
        size, tokens = self.settings.block_size, list[int]()
        for block_hash in sequence.block_hashes[: total // size]:
            tokens += [block_hash & _TOKEN_MASK] * size
        tokens += [-1 - sequence.number] * (total - len(tokens))
        return tokens


class _GivenTokens:
    """The tokens that sequences were given, as `Words` of the timed executor."""

    @staticmethod
    def next(sequence: Any, _allowed: object) -> int:
        """Return the token that a sequence has just produced."""
        return int(sequence.params.extra_args["tokens"][sequence.known - 1])


def _request_id(sequence: EngineSequence) -> str:
    # vLLM orders requests of one priority and arrival by their ID.
    return f"{sequence.number:012d}"


def _config(settings: EngineModelSettings, *, asynchronous: bool) -> Any:
    """Return vLLM's configuration."""
    with tempfile.TemporaryDirectory(prefix="ewsjf-vllm-") as folder:
        model = {**_MODEL, "max_position_embeddings": settings.max_model_len}
        (Path(folder) / "config.json").write_text(json.dumps(model), encoding="utf-8")
        config = from_vllm("EngineArgs")(
            model=folder,
            skip_tokenizer_init=True,
            max_model_len=settings.max_model_len,
            block_size=settings.block_size,
            num_gpu_blocks_override=settings.kv_blocks + 1,
            max_num_seqs=settings.max_num_seqs,
            max_num_batched_tokens=settings.max_num_batched_tokens,
            long_prefill_token_threshold=settings.long_prefill_token_threshold,
            scheduling_policy=settings.scheduling_policy.value,
            enable_prefix_caching=settings.prefix_caching,
            scheduler_reserve_full_isl=settings.full_prompt_must_fit,
            enable_chunked_prefill=True,
        ).create_engine_config()
    # vLLM decides by its executor, of which there is none here.
    config.scheduler_config.async_scheduling = asynchronous
    config.cache_config.num_gpu_blocks = settings.kv_blocks + 1
    return config


def _scheduler(config: Any, settings: EngineModelSettings) -> Any:
    """Return the scheduler as `EngineCore` creates it, for a model with full attention."""
    layer = from_vllm("FullAttentionSpec")(
        block_size=settings.block_size, num_kv_heads=1, head_size=1, dtype=config.model_config.dtype
    )
    cache = from_vllm("KVCacheConfig")(
        num_blocks=settings.kv_blocks + 1,
        kv_cache_tensors=[],
        kv_cache_groups=[from_vllm("KVCacheGroupSpec")(["layers.0"], layer)],
    )
    return config.scheduler_config.get_scheduler_cls()(
        vllm_config=config,
        kv_cache_config=cache,
        structured_output_manager=from_vllm("StructuredOutputManager")(config),
        block_size=settings.block_size,
    )
