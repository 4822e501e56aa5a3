"""Admission to the emulated engine: served names, vLLM's limits and errors, and the lengths of answers."""

import math
import random
from dataclasses import dataclass
from typing import Any

import msgspec

from serve_app.engines.emulated.driver import EngineDriver, Ticket
from serve_app.engines.emulated.http import ApiError, invalid, unknown_model, unreadable
from serve_app.engines.emulated.metrics import EngineMetrics
from serve_app.engines.emulated.requests import Generation
from serve_app.engines.emulated.text import GeneratedOutput, Prompt, generate_output
from serve_app.engines.model import EngineModelSettings, EngineSequence, SchedulingPolicy


class _Adapter(msgspec.Struct):
    lora_name: str


_adapter_decoder = msgspec.json.Decoder(_Adapter)


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
            raise unknown_model(model, (*self._models, *self._adapters))
        return model or self._models[0]

    def load(self, body: bytes) -> str:
        """Load the adapter that a request names, and return its name."""
        name = _adapter_name(body)
        if name in self._adapters:
            raise invalid(f"The lora adapter '{name}' has already been loaded.")
        self._adapters[name] = None
        return name

    def unload(self, body: bytes) -> str:
        """Unload the adapter that a request names, and return its name."""
        name = _adapter_name(body)
        if name not in self._adapters:
            raise unknown_model(name, self._models)
        del self._adapters[name]
        return name

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


def _adapter_name(body: bytes) -> str:
    try:
        return _adapter_decoder.decode(body).lora_name
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise unreadable(str(error)) from error


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
        tokens = max(tokens, generation.body.min_tokens)
        return (limit, "length") if tokens > limit else (tokens, "stop")


@dataclass(frozen=True, slots=True, kw_only=True)
class EmulatedAdmission:
    """Admission control of the engine: converts requests to tickets, or rejects them with `ApiError`.

    Attributes:
        max_num_queued_reqs: maximum number of waiting and running sequences; None for no limit.
    """

    limits: EngineModelSettings
    driver: EngineDriver
    lengths: OutputLengthSampler
    metrics: EngineMetrics
    max_num_queued_reqs: int | None

    def admit(self, generation: Generation, request_id: str, raw: str | None) -> Ticket:
        """Return a ticket with one sequence per choice of each prompt.

        Args:
            raw: text of a constrained answer or a tool call; None for placeholder text.
        """
        limits = self.limits
        self._check_priority(generation.body.priority)
        if generation.max_tokens is not None and generation.max_tokens > limits.max_model_len:
            param = generation.max_tokens_param
            raise invalid(
                f"{param}={generation.max_tokens} cannot be greater than max_model_len="
                f"{limits.max_model_len}. Please request fewer output tokens.",
                param=param,
                value=generation.max_tokens,
            )
        output_limits = [self._output_limit(generation, prompt) for prompt in generation.prompts]
        self._check_queue(len(output_limits) * generation.choices)
        spec = generation.spec
        sequences: list[EngineSequence] = []
        outputs: list[GeneratedOutput] = []
        for prompt, output_limit in zip(generation.prompts, output_limits, strict=True):
            for _ in range(generation.choices):
                number = len(sequences)
                length = self.lengths.draw(generation, output_limit)
                seed = number + (prompt.seed if spec.seed is None else spec.seed)
                output = generate_output(spec, raw, seed, length, output_limit)
                outputs.append(output)
                sequence_id, tokens = f"{request_id}-{number}", len(output.tokens)
                sequences.append(self._sequence(sequence_id, prompt, tokens, generation.body.priority))
        return Ticket(sequences, outputs, streaming=bool(generation.body.stream))

    def admit_embeddings(self, prompts: list[Prompt], priority: int, request_id: str) -> Ticket:
        """Return a ticket whose sequences compute their prompts and generate nothing."""
        self._check_priority(priority)
        for prompt in prompts:
            self._check_prompt(prompt)
        self._check_queue(len(prompts))
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
                f"The decoder prompt (length {prompt.tokens}) plus the number of "
                "requested output tokens (at least 1) is longer than the maximum model "
                f"length of {prompt.tokens}. Make sure that `max_model_len` is no smaller "
                "than the number of text tokens (prompt + requested output tokens)."
            )
        return left if generation.max_tokens is None else min(left, generation.max_tokens)

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

    def _check_prompt(self, prompt: Prompt) -> None:
        if prompt.tokens > self.limits.max_model_len:
            raise invalid(
                f"This model's maximum context length is {self.limits.max_model_len} tokens. However, your "
                f"prompt contains {prompt.tokens} input tokens, which exceeds this limit even without any "
                "output tokens. Please reduce the length of the input prompt.",
                param="input_tokens",
                value=prompt.tokens,
            )

    def _check_priority(self, priority: int) -> None:
        if priority and self.limits.scheduling_policy is not SchedulingPolicy.PRIORITY:
            raise invalid(f"Got priority {priority} but Priority scheduling is not enabled.")

    def _check_queue(self, sequences: int) -> None:
        limit = self.max_num_queued_reqs
        if limit is not None and self.driver.open_sequences + sequences > limit:
            self.metrics.count_rejection()
            raise ApiError(
                503,
                "The engine is currently busy and cannot accept new requests. Please try again later or on a "
                "different instance.",
                kind="Service Unavailable",
            )
