"""Admission to the emulated engine: served names, vLLM's context limits, and the lengths of answers."""

import math
import random
from dataclasses import dataclass
from typing import Any

import msgspec

from serve_app.engines.emulated.driver import EngineDriver, Ticket
from serve_app.engines.emulated.http import ApiError, invalid
from serve_app.engines.emulated.requests import Generation, decode, decoder_of
from serve_app.engines.emulated.text import NO_ARGUMENTS, GeneratedOutput, Prompt, words
from serve_app.engines.model import EngineModelSettings, EngineSequence


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
