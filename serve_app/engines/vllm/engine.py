"""vLLM's own OpenAI server, in this process, as an engine."""

import argparse
import asyncio
import contextlib
import functools
import logging
import multiprocessing
import os
import threading
import time
import types
from collections.abc import Mapping
from dataclasses import field, replace
from typing import Annotated, Any

from serve_app.core.settings_base import ADVANCED, INTERNAL, POSITIVE, settings
from serve_app.engines.adapters.vllm import kv_capacity_tokens
from serve_app.engines.engine import ASGIApp, EngineLimits, EngineLoad
from serve_app.engines.hang_watch import HangWatch
from serve_app.engines.orphan_guard import OrphanGuard
from serve_app.engines.vllm.args import REFUSED_ARGS, Approval, parse_arguments
from serve_app.engines.vllm.library import from_vllm, is_installed, version
from serve_app.engines.vllm.load_meter import LoadMeter, StepRecorder
from serve_app.errors import EngineError, ServeAppError, SettingsError

logger = logging.getLogger(__name__)

# Defaults, which the replica's own environment and the settings override.
_DEFAULT_ENV = {
    # No reports from a production system to vLLM's statistics server.
    "VLLM_NO_USAGE_STATS": "1",
    # A forked child of a process with threads and an event loop inherits locks that are never released.
    "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
    # On CPUs, vLLM's `auto` pins the workers of every engine of a machine to the same cores, all but one.
    # With two cores, the workers of a short and a long pool are both pinned to core 0. Unbound, they may use
    # all cores, with OMP_NUM_THREADS threads each, which Ray sets to the replica's num_cpus. `auto` may suit
    # an engine that is alone on its machine.
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
}


# The kernel takes a moment to free the memory of a killed process.
_REAP_TIMEOUT_S = 5.0


@settings
class VllmEngineSettings:
    """The model that vLLM serves, and its arguments.

    Attributes:
        model: folder of the weights, or a name on the model hub.
        served_model_names: names that clients may use in `model`: those of its model when not given; an empty
            list means `model` itself.
        args: arguments of vLLM's server and engine in snake_case, e.g. `max_model_len: 8192`.
        env: environment variables of the engine's processes, e.g. `VLLM_CPU_KVCACHE_SPACE: "1"` (GiB). They
            override those of the replica, which override our defaults.
        stop_timeout_s: time for the engine's processes to end by themselves before they are killed.
        stall_timeout_s: an engine that has requests and computes nothing for so long counts as dead.
    """

    model: str
    served_model_names: Annotated[tuple[str, ...] | None, ADVANCED] = None
    args: Mapping[str, Any] = field(default_factory=dict)
    env: Mapping[str, str] = field(default_factory=dict)
    # No request runs any more when an engine is stopped, so a kill loses nothing. An orderly end takes some
    # ten seconds, most of them in the interpreters, and a replica that is told to stop has few.
    stop_timeout_s: Annotated[float, POSITIVE, INTERNAL] = 3.0
    # Longer than any single iteration. The replica is then replaced, and requests without a first token are
    # served elsewhere; else they would wait until the gateways' `silence_timeout_s`.
    stall_timeout_s: Annotated[float, POSITIVE, ADVANCED] = 60.0

    def __post_init__(self) -> None:
        if not self.model:
            raise ValueError("model is empty: give the folder of the weights, or a name on the model hub")
        for name in self.args:
            if remedy := REFUSED_ARGS.get(name):
                raise ValueError(f"args.{name} is not set here: {remedy}")

    def check(self) -> None:
        """Check the arguments with vLLM's own parser, before anything is started.

        Where vLLM is not installed (a driver or a head node) nothing is checked: a log line says so, and the
        replica checks when it starts. The import of vLLM takes some ten seconds, so what was accepted once is
        not checked again.

        Raises:
            SettingsError: an argument is unknown, or its value is not one that vLLM takes.
            EngineError: the installed vLLM is not one of the supported releases.
        """
        if not is_installed():
            logger.info(
                "vLLM is not installed here: the arguments for %s are checked where it starts", self.model
            )
            return
        approval = Approval(self.model, self.args)
        if not approval.is_given:
            _parse_args(self)
            approval.give()

    def make(self) -> "VllmEngine":
        """Return the engine, not started yet."""
        return VllmEngine(self)


class VllmEngine:
    """One vLLM engine: its server's ASGI app in this process, its core and workers in their own.

    A process holds one such engine at a time: vLLM's metrics and environment belong to the process. The app
    is complete when `start` returns; its server need not send ASGI lifespan events.
    """

    def __init__(self, settings: VllmEngineSettings) -> None:
        self._settings = settings
        self._meter = LoadMeter()
        self._stall = HangWatch()
        self._orphans = OrphanGuard()
        self._llm: Any = None
        self._app: ASGIApp | None = None
        self._lifespan = contextlib.AsyncExitStack()
        # Set by stop(), read by the thread that builds the engine.
        self._stopped = False
        self._lock = threading.Lock()

    def __repr__(self) -> str:
        state = "stopped" if self._stopped else "serving" if self._app else "not started"
        return f"<VllmEngine {self._settings.model} {state} {self._meter!r}>"

    async def start(self) -> EngineLimits:
        """Load the weights and start the engine's processes, which takes from half a minute to many minutes.

        Raises:
            EngineError: vLLM is missing, not supported, or could not start; its own log states the cause.
            SettingsError: an argument is unknown or has an invalid value.
        """
        try:
            async with self._orphans.guarding_new_children():
                # In a thread: on the event loop it would block health checks for a minute.
                args = await asyncio.to_thread(self._build)
            self._app = await self._build_app(args)
        except BaseException as exc:
            await self.stop()
            if isinstance(exc, ServeAppError) or not isinstance(exc, Exception):
                raise
            raise EngineError(
                f"vLLM could not start {self._settings.model}: {exc}: its own log lines above have the cause"
            ) from exc
        return _limits(self._llm.vllm_config)

    @property
    def app(self) -> ASGIApp:
        """The OpenAI-compatible application of vLLM."""
        if self._app is None:
            raise EngineError(f"{self!r} has no app: call start() first")
        return self._app

    async def load(self) -> EngineLoad:
        """The load as of the engine's last step.

        Raises:
            EngineError: the engine is dead or hangs.
        """
        await self.check_health()
        load = self._meter.load(self._llm.get_num_unfinished_requests(), time.monotonic())
        return replace(load, adapters=self._adapters())

    def _adapters(self) -> tuple[str, ...]:
        """As vLLM's list of models has them; they may be loaded and unloaded while it runs."""
        models = getattr(getattr(self._app, "state", None), "openai_serving_models", None)
        return tuple(sorted(models.lora_requests)) if models is not None else ()

    async def check_health(self) -> None:
        """Raise `EngineError` unless the engine's processes are alive and at work where there is any."""
        if self._llm is None:
            raise EngineError(f"{self!r} cannot be healthy: call start() first")
        try:
            await self._llm.check_health()
        except Exception as exc:
            model = self._settings.model
            raise EngineError(f"the vLLM engine of {model} is dead ({exc}): replace the replica") from exc
        self._check_progress()

    async def stop(self) -> None:
        """End the engine's processes and free its memory; may be called at any time, and repeatedly."""
        with self._lock:
            self._stopped = True
            llm, self._llm, self._app = self._llm, None, None
        try:
            await self._lifespan.aclose()
        finally:
            if llm is not None:
                if llm.output_handler is not None:
                    llm.output_handler.cancel()  # it would report the end of the processes as a failure
                await asyncio.to_thread(self._shut_down, llm)
            self._orphans.release()

    def _check_progress(self) -> None:
        """Raise when requests wait for an engine that computes nothing.

        Iterations of all cores count together: one of several that hangs is found by vLLM itself, if at all.
        """
        unfinished = self._llm.get_num_unfinished_requests()
        stalled_s = self._stall.note(self._meter.steps, busy=unfinished > 0, now=time.monotonic())
        if stalled_s > self._settings.stall_timeout_s:
            raise EngineError(
                f"the vLLM engine of {self._settings.model} hangs: it has {unfinished} requests and has "
                f"computed nothing for {stalled_s:.0f} s (stall_timeout_s {self._settings.stall_timeout_s:g})"
            )

    def _build(self) -> argparse.Namespace:
        """Start the engine. A thread cannot be cancelled, so it checks for a `stop` at the end."""
        os.environ.update({**_DEFAULT_ENV, **os.environ, **self._settings.env})
        args = _parse_args(self._settings)
        _prepare(args)
        llm = from_vllm("AsyncLLM").from_engine_args(
            from_vllm("AsyncEngineArgs").from_cli_args(args),
            usage_context=from_vllm("UsageContext").OPENAI_API_SERVER,
            stat_loggers=[functools.partial(StepRecorder, self._meter)],
        )
        with self._lock:
            if not self._stopped:
                self._llm = llm
                return args
        self._shut_down(llm)
        raise EngineError(f"{self!r} was stopped while it started")

    def _shut_down(self, llm: Any) -> None:
        llm.shutdown(timeout=self._settings.stop_timeout_s)
        # Its destructor would call it again, perhaps during the interpreter's shutdown.
        llm.shutdown = _do_nothing
        for child in multiprocessing.active_children():
            if child.pid in self._orphans.protected:
                child.join(_REAP_TIMEOUT_S)

    async def _build_app(self, args: argparse.Namespace) -> ASGIApp:
        llm = self._llm
        tasks = await llm.get_supported_tasks()
        await llm.reset_mm_cache()  # drops the dummy inputs with which vLLM measured its memory
        app = from_vllm("build_app")(args, supported_tasks=tasks, model_config=llm.model_config)
        await from_vllm("init_app_state")(llm, app.state, args, tasks)
        # When the engine is dead, vLLM's error handler asks its server to exit; ours uses check_health.
        app.state.server = types.SimpleNamespace()
        # vLLM's own start and end of service: a line of statistics every ten seconds, and a heap that the
        # garbage collector skips. The replica's server sends no lifespan events.
        await self._lifespan.enter_async_context(app.router.lifespan_context(app))
        served: ASGIApp = app
        return served


def _do_nothing() -> None:
    pass


def _limits(config: Any) -> EngineLimits:
    cores = config.parallel_config.data_parallel_size
    max_model_len = config.model_config.max_model_len
    max_num_seqs = config.scheduler_config.max_num_seqs * cores
    cache = config.cache_config
    kv_tokens = kv_capacity_tokens(
        cache.kv_cache_size_tokens, cache.num_gpu_blocks or 0, cache.block_size, cores
    )
    if not kv_tokens:
        # An embedding model without a KV cache: only the batch limits it.
        kv_tokens = max_num_seqs * max_model_len
    return EngineLimits(
        max_model_len=max_model_len,
        kv_tokens=kv_tokens,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=config.scheduler_config.max_num_batched_tokens,
        long_prefill_token_threshold=config.scheduler_config.long_prefill_token_threshold,
    )


def _parse_args(settings: VllmEngineSettings) -> argparse.Namespace:
    parser = from_vllm("FlexibleArgumentParser")(prog=f"vLLM {version()}")
    fixed = [f"--model={settings.model}"]
    if settings.served_model_names:
        fixed += ["--served-model-name", *settings.served_model_names]
    return parse_arguments(from_vllm("make_arg_parser")(parser), settings.args, fixed)


def _prepare(args: argparse.Namespace) -> None:
    """Validate the arguments and load plugins, as vLLM's own launcher does before its engine."""
    try:
        from_vllm("validate_parsed_serve_args")(args)
    except (ValueError, TypeError) as exc:
        raise SettingsError(f"vLLM {version()} refuses its arguments: {exc}") from exc
    if args.tool_parser_plugin:
        from_vllm("ToolParserManager").import_tool_parser(args.tool_parser_plugin)
    if args.reasoning_parser_plugin:
        from_vllm("ReasoningParserManager").import_reasoning_parser(args.reasoning_parser_plugin)
