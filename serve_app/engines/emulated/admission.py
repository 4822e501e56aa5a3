"""Admission to the emulated engine: vLLM's limits and refusals, and the sequences of an admitted request."""

from collections.abc import Sequence
from dataclasses import dataclass

from serve_app.engine_model import EngineModelSettings, EngineSequence, SchedulingPolicy
from serve_app.engines.emulated import errors
from serve_app.engines.emulated.content.script import Script, write_script
from serve_app.engines.emulated.content.spec import RawText
from serve_app.engines.emulated.driver import EngineDriver, Ticket
from serve_app.engines.emulated.lengths import OutputLength, OutputLengthSampler
from serve_app.engines.emulated.metrics import EngineMetrics
from serve_app.engines.emulated.requests import Generation
from serve_app.engines.emulated.stored.names import EmulatedNames
from serve_app.engines.emulated.text import Prompt


@dataclass(frozen=True, slots=True, kw_only=True)
class AdmissionRules:
    """The limits of admission.

    Attributes:
        names: those that it answers to.
        max_num_queued_reqs: most sequences that wait or run; None for no limit.
    """

    limits: EngineModelSettings
    names: EmulatedNames
    max_num_queued_reqs: int | None


class EmulatedAdmission:
    """Turns requests into tickets, or refuses them with an `ApiError`."""

    def __init__(
        self,
        rules: AdmissionRules,
        driver: EngineDriver,
        lengths: OutputLengthSampler,
        metrics: EngineMetrics,
    ) -> None:
        self._rules = rules
        self._driver = driver
        self._lengths = lengths
        self._metrics = metrics

    def check_model(self, model: str | None) -> str:
        """The model name of the answer; a request without one is for the engine's own model."""
        return self._rules.names.check(model)

    def admit(self, generation: Generation, request_id: str, texts: Sequence[RawText] = ()) -> Ticket:
        """A ticket with a sequence for every choice of every prompt.

        Args:
            generation: the request.
            request_id: of its answer.
            texts: those of constrained answers; there may be fewer than answers.
        """
        limits = self._rules.limits
        self._check_priority(generation.priority)
        if generation.max_tokens is not None and generation.max_tokens > limits.max_model_len:
            errors.refuse_long_output(
                generation.max_tokens_param, generation.max_tokens, limits.max_model_len
            )
        output_limits = [self._output_limit(generation, prompt) for prompt in generation.prompts]
        self._check_queue(len(output_limits) * generation.choices)
        sequences: list[EngineSequence] = []
        reasons: list[str] = []
        scripts: list[Script] = []
        for prompt, output_limit in zip(generation.prompts, output_limits, strict=True):
            for _ in range(generation.choices):
                number = len(sequences)
                length = self._lengths.draw(generation, output_limit)
                if generation.spec is not None:
                    text = texts[number % len(texts)] if texts else None
                    scripts.append(write_script(generation.spec, text, number, length, output_limit))
                    length = OutputLength(len(scripts[-1].tokens), scripts[-1].finish_reason)
                reasons.append(length.finish_reason)
                sequence_id = f"{request_id}-{number}"
                sequences.append(self._sequence(sequence_id, prompt, length.tokens, generation.priority))
        return Ticket(sequences, reasons, streaming=generation.stream, scripts=scripts)

    def admit_embeddings(self, prompts: list[Prompt], priority: int, request_id: str) -> Ticket:
        """A ticket with sequences that compute their prompts and generate nothing."""
        self._check_priority(priority)
        for prompt in prompts:
            self._check_prompt(prompt)
        self._check_queue(len(prompts))
        sequences = [
            self._sequence(f"{request_id}-{index}", prompt, 0, priority)
            for index, prompt in enumerate(prompts)
        ]
        return Ticket(sequences, ["stop"] * len(sequences), streaming=False)

    def _output_limit(self, generation: Generation, prompt: Prompt) -> int:
        """The most output tokens: `max_tokens`, or the rest of the context."""
        self._check_prompt(prompt)
        left = self._rules.limits.max_model_len - prompt.tokens
        if not left:
            errors.refuse_full_prompt(prompt.tokens)
        return left if generation.max_tokens is None else min(left, generation.max_tokens)

    def _sequence(
        self, sequence_id: str, prompt: Prompt, target_tokens: int, priority: int
    ) -> EngineSequence:
        return EngineSequence(
            sequence_id=sequence_id,
            prompt_tokens=prompt.tokens,
            target_tokens=target_tokens,
            arrived_at=self._driver.now(),
            priority=priority,
            block_hashes=prompt.block_hashes,
        )

    def _check_prompt(self, prompt: Prompt) -> None:
        if prompt.tokens > self._rules.limits.max_model_len:
            errors.refuse_long_prompt(prompt.tokens, self._rules.limits.max_model_len)

    def _check_priority(self, priority: int) -> None:
        if priority and self._rules.limits.scheduling_policy is not SchedulingPolicy.PRIORITY:
            raise errors.invalid(f"Got priority {priority} but Priority scheduling is not enabled.")

    def _check_queue(self, sequences: int) -> None:
        limit = self._rules.max_num_queued_reqs
        if limit is not None and self._driver.open_sequences + sequences > limit:
            self._metrics.count_rejection()
            raise errors.queue_is_full()
