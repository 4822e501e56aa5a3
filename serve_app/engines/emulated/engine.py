"""Emulated engine: continuous batching without a GPU, for laptops, load tests and twins of real fleets.

It serves the OpenAI API with placeholder text, at the speed of a named profile, and exposes vLLM's metrics.
Queueing, batching, chunked prefill, the KV cache with prefix caching and preemption, context limits,
streaming and cancellation behave as in vLLM. The content of an answer does not follow the request.
"""

import random
from collections.abc import Mapping
from dataclasses import replace
from typing import Annotated, Any, ClassVar

from serve_app.core.settings_base import ADVANCED, INTERNAL, NOT_NEGATIVE, POSITIVE, settings
from serve_app.engines.emulated.app import EmulatedApp
from serve_app.engines.emulated.driver import (
    EmulatedAdmission,
    EngineDriver,
    EngineMetrics,
    OutputLengthSampler,
    ServedNames,
)
from serve_app.engines.emulated.requests import PseudoTokenizer
from serve_app.engines.engine import ASGIApp, EngineLimits, EngineLoad
from serve_app.engines.model import EngineModel, EngineModelSettings, SchedulingPolicy
from serve_app.engines.model.roofline import EngineProfile, load_profile
from serve_app.errors import SettingsError

_LIMITS = (
    "max_num_seqs",
    "max_num_batched_tokens",
    "long_prefill_token_threshold",
    "kv_tokens",
    "max_model_len",
)


@settings
class EmulatedEngineSettings:
    """Settings of one emulated engine.

    Attributes:
        served_model_names: names that clients may use in `model`; answers carry the first.
        profile: name or path of an engine profile.
        max_model_len, max_num_seqs, max_num_batched_tokens, kv_tokens: override the profile's values.
        seed: seed of the random answer lengths.
    """

    served_model_names: Annotated[tuple[str, ...] | None, INTERNAL] = None
    # LoRA adapters loaded at startup. More can be loaded at runtime, as in vLLM.
    lora_modules: Annotated[tuple[str, ...], ADVANCED] = ()
    profile: str = "laptop"
    max_model_len: int | None = None
    max_num_seqs: int | None = None
    max_num_batched_tokens: Annotated[int | None, ADVANCED] = None
    kv_tokens: Annotated[int | None, ADVANCED] = None
    # As in vLLM: with 0, one long prefill may use the whole budget of a step; with a limit, short prompts
    # overtake it.
    long_prefill_token_threshold: Annotated[int, ADVANCED] = 0
    # As in vLLM: order of the engine's internal queue, by arrival, or by the `priority` in the request body.
    scheduling_policy: Annotated[SchedulingPolicy, ADVANCED] = SchedulingPolicy.FCFS
    # Seconds of engine time per second of wall time; it divides every latency, TPOT and metric. Above about
    # 20 the process cannot keep up with small steps, and the engine is slower than configured.
    speed_up: Annotated[float, POSITIVE, ADVANCED] = 1.0
    seed: Annotated[int, INTERNAL] = 0
    # Mean length of answers for requests that do not state it; log-normal, about as wide as in chat traces.
    mean_output_tokens: Annotated[float, POSITIVE, INTERNAL] = 120.0
    # Standard deviation of the logarithm of those lengths.
    output_tokens_sigma: Annotated[float, NOT_NEGATIVE, INTERNAL] = 0.8

    PRIORITY_SETTING: ClassVar[str] = "advanced.scheduling_policy"

    def __post_init__(self) -> None:
        if not all(self.model_names) or not self.model_names:
            raise SettingsError(
                f"served_model_names needs at least one name, none empty: {self.served_model_names}"
            )
        # Reject contradictory limits before a replica starts.
        self.model_settings(load_profile(self.profile))

    @property
    def context_limit(self) -> int | None:
        """Context limit in tokens."""
        return self.max_model_len or load_profile(self.profile).max_model_len

    @property
    def schedules_by_priority(self) -> bool | None:
        """True if the engine orders its queue by request priority."""
        return self.scheduling_policy is SchedulingPolicy.PRIORITY

    def batch_limits(self) -> Mapping[str, Any]:
        """Return the limits of its batches; see the protocol."""
        policy = None if self.scheduling_policy is SchedulingPolicy.FCFS else self.scheduling_policy
        return {**{name: getattr(self, name) for name in _LIMITS}, "scheduling_policy": policy}

    @property
    def simulated_profile(self) -> str | None:
        """Its profile."""
        return self.profile

    def check(self) -> None:
        """Do nothing, because the engine has no installation that could reject the settings."""

    def make(self) -> "EmulatedEngine":
        """Return a new engine that has not been started."""
        return EmulatedEngine(self)

    @property
    def model_names(self) -> tuple[str, ...]:
        """Served names. The default applies to engines outside an application."""
        return ("emulated",) if self.served_model_names is None else self.served_model_names

    def model_settings(self, profile: EngineProfile) -> EngineModelSettings:
        """Return the engine's limits: the profile's, with the overrides of these settings.

        Raises:
            SettingsError: the limits contradict each other.
        """
        try:
            return profile.model_settings(
                **{name: getattr(self, name) for name in _LIMITS},
                scheduling_policy=self.scheduling_policy,
            )
        except ValueError as error:
            raise SettingsError(f"emulated engine on profile {self.profile}: {error}") from error


class EmulatedEngine:
    """An engine that computes only its timing. Implements `engine.Engine`."""

    def __init__(self, settings: EmulatedEngineSettings) -> None:
        self._settings = settings
        profile = load_profile(settings.profile)
        self._limits = settings.model_settings(profile)
        self._step_time = profile.step_time
        model = EngineModel(self._limits, profile.step_time)
        metrics = EngineMetrics(settings.model_names[0], self._limits)
        self._driver = EngineDriver(model, metrics, settings.speed_up)
        metrics.watch(self._driver.snapshot)
        rng = random.Random(settings.seed)  # noqa: S311 - lengths of placeholder answers, not secrets
        lengths = OutputLengthSampler(settings.mean_output_tokens, settings.output_tokens_sigma, rng)
        self._names = ServedNames(settings.model_names, settings.lora_modules)
        admission = EmulatedAdmission(limits=self._limits, driver=self._driver, lengths=lengths)
        tokenizer = PseudoTokenizer(self._limits.block_size)
        self._app = EmulatedApp(self._driver, admission, metrics, tokenizer, self._names)

    def __repr__(self) -> str:
        return f"<EmulatedEngine profile={self._settings.profile} {self._driver!r}>"

    async def start(self) -> EngineLimits:
        """Start the engine's clock and return the limits."""
        self._driver.start()
        return EngineLimits(
            max_model_len=self._limits.max_model_len,
            kv_tokens=self._limits.kv_blocks * self._limits.block_size,
            max_num_seqs=self._limits.max_num_seqs,
            tpot_s=self._step_time.step_s(sequences=self._limits.max_num_seqs) / self._settings.speed_up,
            prefill_token_s=self._step_time.prefill_per_token_s / self._settings.speed_up,
            max_num_batched_tokens=self._limits.max_num_batched_tokens,
            long_prefill_token_threshold=self._limits.long_prefill_token_threshold,
        )

    @property
    def app(self) -> ASGIApp:
        """The OpenAI-compatible server."""
        return self._app

    async def load(self) -> EngineLoad:
        """Return the load; `tpot_s` is wall time as a client sees it, so a speed-up divides it."""
        self._driver.check()
        return replace(self._driver.load(), adapters=self._names.adapters)

    async def check_health(self) -> None:
        """Raise `EngineError` if the engine is not running."""
        self._driver.check()

    async def stop(self) -> None:
        """Stop the clock and fail unfinished requests."""
        await self._driver.stop()
