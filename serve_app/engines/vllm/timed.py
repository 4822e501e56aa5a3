"""vLLM's executor without a model: iterations take the time of a profile, and tokens are random words.

All but the forward pass is vLLM's own: server, tokenizer, scheduler, paged KV cache with prefix caching and
preemption, asynchronous scheduling, grammars, metrics, priorities. vLLM imports this module and creates the
executor in the process of its engine core, as its arguments say:

    vllm serve FOLDER --distributed-executor-backend serve_app.engines.vllm.timed.TimedExecutor
        --additional-config '{"timed": "llama31-8b-rtx4090-tp1"}' --block-size 16

- `TimedExecutor`: runs vLLM's batches one after the other. An iteration begins when vLLM hands its batch
  over, at the earliest at the end of the previous one. The KV cache has the profile's number of tokens,
  unless `--num-gpu-blocks-override` changes it.
- `Sequences`: what is computed of each sequence, and so the work of an iteration. A preempted sequence is
  computed again, with the tokens that it had produced.
- `Words`: the tokens. A sequence consists of words of the tokenizer, and ends at a random length or a limit
  of the request. Both depend on the prompt alone. A request with a grammar gets tokens that it allows.

Not done: speculative decoding, log probabilities of prompts, and sampling parameters that choose tokens.
"""

import re
import time
import zlib
from array import array
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from math import log
from typing import Any

import numpy as np
import torch
from vllm.config import VllmConfig
from vllm.sampling_params import SamplingParams
from vllm.tokenizers import cached_tokenizer_from_config
from vllm.v1.core.sched.output import GrammarOutput, NewRequestData, SchedulerOutput
from vllm.v1.executor.abstract import Executor
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheSpec
from vllm.v1.outputs import EMPTY_MODEL_RUNNER_OUTPUT, LogprobsLists, ModelRunnerOutput

from serve_app.engines.model.roofline import load_profile
from serve_app.engines.model.step_time import attended_pairs
from serve_app.engines.vllm.library import TIMED_KEY
from serve_app.errors import EngineError, SettingsError

# Mean output tokens of a request without a limit; lengths are distributed exponentially.
_MEAN_LENGTH = 200
# Seconds to offload the weights to memory, and to load them again.
_SLEEP_S, _WAKE_UP_S = 1.0, 2.0
# Tokens after which a request with a grammar closes what is open: a string or list may go on for ever.
_GRAMMAR_TOKENS = 48
# Tokens of a vocabulary; those that begin a word have a mark for the space before it.
_WORD = re.compile("[\u0120\u2581][a-z]{3,}")
_PRINTED = re.compile("[\u0120\u2581]?[!-~]+")
_CLOSING = re.compile(r'["\]}]+')


class TimedExecutor(Executor):  # type: ignore[misc]  # untyped where vLLM is not installed
    """Executor that takes the time of an engine, in the process of vLLM's engine core."""

    def _init_executor(self) -> None:
        given = self.vllm_config.additional_config
        name = given.get(TIMED_KEY) if isinstance(given, Mapping) else None
        if not isinstance(name, str):
            option = f'--additional-config \'{{"{TIMED_KEY}": "NAME"}}\''
            raise SettingsError(f"the timed executor needs a profile: {option}")
        if self.vllm_config.speculative_config is not None:
            raise SettingsError("the timed executor has no speculative decoding: remove speculative_config")
        profile = load_profile(name)
        self._step_s, self._kv_tokens = profile.step_time.step_s, profile.kv_tokens
        self._sequences, self._words = Sequences(), Words.of(self.vllm_config)
        self._batch: Batch | None = None
        self._free_at = 0.0
        # One thread: iterations end in their order.
        self._ends = ThreadPoolExecutor(1, "timed-engine")

    @classmethod
    def supports_async_scheduling(cls) -> bool:
        """Return True: the next batch is scheduled while one runs."""
        return True

    # -- memory

    def get_kv_cache_specs(self) -> list[dict[str, KVCacheSpec]]:
        """Return one layer with the smallest content: only the number of blocks matters."""
        return [{"layers.0": self._layer()}]

    def determine_available_memory(self) -> list[int]:
        """Return the bytes of the profile's KV cache, in full blocks."""
        blocks = self._kv_tokens // self.cache_config.block_size
        return [blocks * self._layer().page_size_bytes]

    def _layer(self) -> FullAttentionSpec:
        return FullAttentionSpec(
            block_size=self.cache_config.block_size, num_kv_heads=1, head_size=1, dtype=torch.bfloat16
        )

    # -- iterations

    def execute_model(self, scheduler_output: SchedulerOutput, non_block: bool = False) -> Any:
        """Begin an iteration; its output is that of `sample_tokens`."""
        work = self._sequences.advance(scheduler_output)
        result = None
        if scheduler_output.total_num_scheduled_tokens:
            begin = max(time.monotonic(), self._free_at)
            self._free_at = begin + self._step_s(**work)
            self._batch = Batch(list(scheduler_output.num_scheduled_tokens), self._free_at)
        else:
            result = EMPTY_MODEL_RUNNER_OUTPUT
        return _done(result) if non_block else result

    def sample_tokens(self, grammar_output: GrammarOutput | None, non_block: bool = False) -> Any:
        """Return the tokens of the iteration at its end."""
        batch, self._batch = self._batch, None
        assert batch is not None, "vLLM executes a batch before it samples its tokens"
        output = self._sequences.sample(batch.request_ids, self._words, _masks(grammar_output))

        def at_end() -> ModelRunnerOutput:
            time.sleep(max(0.0, batch.ends_at - time.monotonic()))
            return output

        return self._ends.submit(at_end) if non_block else at_end()

    # -- the rest

    def collective_rpc(
        self,
        method: str | Callable[..., Any],
        timeout: float | None = None,  # noqa: ARG002 - the arguments of vLLM's interface
        args: tuple[Any, ...] = (),  # noqa: ARG002
        kwargs: dict[str, Any] | None = None,  # noqa: ARG002
        non_block: bool = False,
    ) -> Any:
        """Answer a call to the workers, which do not exist.

        Raises:
            EngineError: the call needs what a timed engine does not have, such as weights.
        """
        name = method if isinstance(method, str) else getattr(method, "__name__", "")
        if name not in _CALLS:
            raise EngineError(f"a timed engine has no workers that could answer {name or method!r}")
        answer, seconds = _CALLS[name]
        time.sleep(seconds)
        return _done([answer]) if non_block else [answer]

    def compile_or_warm_up_model(self) -> None:
        """Do nothing: there is no model."""

    def check_health(self) -> None:
        """Do nothing: there are no workers that could fail."""

    def shutdown(self) -> None:
        """Stop. Iterations that have not ended are discarded."""
        self._ends.shutdown(wait=False, cancel_futures=True)


# Calls to workers, with their answer and duration in seconds.
_CALLS: Mapping[str, tuple[Any, float]] = {
    "sleep": (None, _SLEEP_S),
    "wake_up": (None, _WAKE_UP_S),
    "get_supported_kv_cache_layouts": (["NHD"], 0.0),
    "get_supported_tasks": (("generate",), 0.0),
    "supports_draft_weight_updates": (False, 0.0),
    "list_loras": (set(), 0.0),
    **dict.fromkeys(("add_lora", "remove_lora", "pin_lora"), (True, 0.0)),
    **dict.fromkeys(("initialize_from_config", "set_kv_cache_layout", "execute_dummy_batch"), (None, 0.0)),
    **dict.fromkeys(("reset_mm_cache", "reset_encoder_cache", "synchronize_device"), (None, 0.0)),
    **dict.fromkeys(("get_kv_connector_handshake_metadata", "profile", "discard"), (None, 0.0)),
}


def _done(result: Any) -> Future[Any]:
    future: Future[Any] = Future()
    future.set_result(result)
    return future


@dataclass(frozen=True, slots=True)
class Batch:
    """An iteration that has begun."""

    request_ids: list[str]
    ends_at: float


@dataclass(slots=True)
class Sequence:
    """One sequence of a request.

    Attributes:
        computed: tokens whose KV is in the cache, or will be at the end of the iterations that have begun.
        samples: whether the last iteration that has begun produces a token.
    """

    prompt_tokens: int
    params: SamplingParams
    seed: int
    computed: int = 0
    produced: int = 0
    samples: bool = False

    @property
    def known(self) -> int:
        """Tokens of the prompt and those produced."""
        return self.prompt_tokens + self.produced


class Sequences:
    """The running sequences."""

    def __init__(self) -> None:
        self._by_id: dict[str, Sequence] = {}

    def advance(self, scheduled: SchedulerOutput) -> dict[str, int]:
        """Begin an iteration, and return its work, as arguments of `StepTimeModel.step_s`."""
        for request_id in scheduled.finished_req_ids:
            self._by_id.pop(request_id, None)
        for new in scheduled.scheduled_new_reqs:
            # Some of vLLM's runners get a preempted request as a new one.
            self._by_id.setdefault(new.req_id, _sequence(new)).computed = new.num_computed_tokens
        cached = scheduled.scheduled_cached_reqs
        for request_id, computed in zip(cached.req_ids, cached.num_computed_tokens, strict=True):
            self._by_id[request_id].computed = computed
        prefilled = pairs = decoding = context = 0
        for request_id, count in scheduled.num_scheduled_tokens.items():
            sequence = self._by_id[request_id]
            known = sequence.known
            if count == 1 and sequence.produced and sequence.computed + 1 == known:
                decoding += 1
                context += known
            else:
                prefilled += count
                pairs += attended_pairs(sequence.computed, count)
            sequence.computed += count
            sequence.samples = sequence.computed >= known
            sequence.produced += sequence.samples
        return {
            "prefill_tokens": prefilled,
            "attended_pairs": pairs,
            "sequences": decoding,
            "context_tokens": context,
        }

    def sample(
        self, request_ids: list[str], words: "Words", masks: Mapping[str, np.ndarray]
    ) -> ModelRunnerOutput:
        """Return the tokens of the iteration that has begun."""
        tokens: list[list[int]] = []
        most = -1
        for request_id in request_ids:
            sequence = self._by_id[request_id]
            tokens.append([words.next(sequence, masks.get(request_id))] if sequence.samples else [])
            if sequence.samples and sequence.params.logprobs is not None:
                most = max(most, sequence.params.logprobs)
        return ModelRunnerOutput(
            req_ids=request_ids,
            req_id_to_index={request_id: index for index, request_id in enumerate(request_ids)},
            sampled_token_ids=tokens,
            logprobs=None if most < 0 else words.logprobs(tokens, most),
        )


def _sequence(new: NewRequestData) -> Sequence:
    ids = new.prompt_token_ids or ()
    assert new.sampling_params is not None, "a timed engine generates; it has no pooling models"
    return Sequence(new.prompt_len, new.sampling_params, zlib.crc32(array("q", ids)))


def _masks(grammar: GrammarOutput | None) -> Mapping[str, np.ndarray]:
    """Return the tokens that the grammars of requests allow."""
    if grammar is None:
        return {}
    rows = zip(grammar.structured_output_request_ids, grammar.grammar_bitmask, strict=True)
    return {request_id: np.unpackbits(row.view(np.uint8), bitorder="little") for request_id, row in rows}


@dataclass(frozen=True, slots=True)
class Words:
    """Tokens of a tokenizer.

    Attributes:
        ids: tokens that are a word each.
        closing: tokens that end a string, object or list.
        printed: 1 for tokens with printable text that is not blank.
    """

    ids: np.ndarray
    closing: np.ndarray
    printed: np.ndarray

    @classmethod
    def of(cls, config: VllmConfig) -> "Words":
        """Return the words of the engine's tokenizer; without one, all ids are words."""
        size = config.model_config.get_vocab_size()
        tokenizer = cached_tokenizer_from_config(config.model_config)
        if tokenizer is None:
            every = np.arange(size)
            return cls(every, every[:0], np.ones(size, np.uint8))
        special = set(tokenizer.all_special_ids)
        words, closing, printed = [], [], np.zeros(size, np.uint8)
        for text, number in tokenizer.get_vocab().items():
            if number >= size or number in special:
                continue
            printed[number] = _PRINTED.fullmatch(text) is not None
            if _WORD.fullmatch(text):
                words.append(number)
            elif _CLOSING.fullmatch(text):
                closing.append(number)
        return cls(np.array(sorted(words)), np.array(sorted(closing)), printed)

    def next(self, sequence: Sequence, allowed: np.ndarray | None) -> int:
        """Return the next token of a sequence."""
        draw = zlib.crc32(sequence.produced.to_bytes(4, "little"), sequence.seed)
        params = sequence.params
        end: int | None = params.eos_token_id
        if allowed is None:
            length = max(params.min_tokens + 1, 1 - round(_MEAN_LENGTH * log(1 - sequence.seed / 2**32)))
            if end is not None and sequence.produced >= length:
                return end
            return int(self.ids[draw % len(self.ids)])
        if end is not None and allowed[end]:
            return end
        closing = self.closing[allowed[self.closing] > 0]
        if len(closing) and (draw % 4 == 0 or sequence.produced > _GRAMMAR_TOKENS):
            return int(closing[0])
        candidates = self.ids[allowed[self.ids] > 0]
        if not len(candidates):
            candidates = np.flatnonzero(allowed[: len(self.printed)] & self.printed)
        if not len(candidates):
            candidates = np.flatnonzero(allowed)
        return int(candidates[draw // 4 % len(candidates)])

    def logprobs(self, tokens: list[list[int]], most: int) -> LogprobsLists:
        """Return log probabilities: a half for the token, a quarter for the first of `most` others, ..."""
        chosen = [row[0] for row in tokens if row]
        others = np.resize(self.ids, most)
        ids = np.array([[token, *others] for token in chosen], np.int32).reshape(len(chosen), most + 1)
        values = np.resize(-np.log(2.0) * np.arange(1, most + 2), ids.shape).astype(np.float32)
        starts = [0, *np.cumsum([len(row) for row in tokens]).tolist()]
        return LogprobsLists(ids, values, np.ones(len(chosen), np.int32), starts)
