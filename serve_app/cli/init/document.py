"""The configuration file that `init` writes, and the engines that it describes."""

import asyncio
import json
import math
import os
import textwrap
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import yaml

from serve_app.cli.command import warn
from serve_app.cli.http_client import ConnectionFailedError, request
from serve_app.engines.adapters import PageResponse, identify
from serve_app.engines.model.hardware import find_gpu
from serve_app.engines.model.roofline import capacity, max_context, typical_tokens
from serve_app.engines.vllm.engine import VllmEngineSettings
from serve_app.errors import EngineError, ServeAppError, SettingsError
from serve_app.serving.access import is_loopback
from serve_app.settings.checking.capacity import engine_setup

# -- values as YAML within a line --------------------------------------------------------------------------


def scalar(text: str) -> str:
    """Format a text, quoted only if YAML needs it."""
    return yaml.safe_dump(text, width=10_000).removesuffix("\n...\n").removesuffix("\n")


def flow(texts: tuple[str, ...]) -> str:
    """Format a list on one line."""
    return yaml.safe_dump(list(texts), default_flow_style=True, width=10_000).strip()


# -- configuration with emulated engines --------------------------------------------------------------------
#
# A copy of configs/local.yaml, because only files inside the package are installed. A test keeps them equal.


PACKAGED_CONFIG = Path(__file__).with_name("local.yaml")
_OF_A_CLONE = Path("configs/local.yaml")


def default_config() -> Path:
    """Return the default configuration: that of a clone in the working directory, else the packaged one."""
    return _OF_A_CLONE if _OF_A_CLONE.is_file() else PACKAGED_CONFIG


# -- engines that serve requests ---------------------------------------------------------------------------


SHORT_CONTEXT = 8_192
"""Context of the short pool. At least four fifths of most traffic fit into it."""

DEFAULT_CONTEXT = 32_768


@dataclass(frozen=True, slots=True)
class Emulated:
    """Emulated engines, which need no hardware."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpus:
    """GPUs on which vLLM runs one model.

    Attributes:
        count: maximum number of GPUs to use.
        model: a name on the model hub, or a folder.
        max_model_len: context limit in tokens; None for that of the model's folder, or 32,768.
        per_engine: GPUs per engine (tensor parallelism).
        gpu: GPU name as its driver reports it; None if unknown.
    """

    count: int
    model: str
    max_model_len: int | None = None
    per_engine: int = 1
    gpu: str | None = None

    def __post_init__(self) -> None:
        if self.count < self.per_engine:
            raise SettingsError(
                f"an engine needs {self.per_engine} GPUs, but --gpus is {self.count}: lower "
                "--gpus-per-engine or raise --gpus"
            )
        stated = config_context_limit(self.model)
        if self.max_model_len is not None and stated is not None and self.max_model_len > stated:
            raise SettingsError(
                f"max_model_len of {self.max_model_len:,} exceeds "
                f"the {stated:,} tokens in {self.model}/config.json"
            )

    @property
    def engines(self) -> int:
        """Number of engines that fit."""
        return self.count // self.per_engine

    @property
    def context(self) -> int:
        """Context limit in tokens."""
        return self.max_model_len or config_context_limit(self.model) or DEFAULT_CONTEXT

    @property
    def name(self) -> str:
        """Model name for clients."""
        return Path(self.model).name


@dataclass(frozen=True, slots=True, kw_only=True)
class Server:
    """A running server, and what it reports.

    Attributes:
        url: address without `/v1`.
        models: served names, the base model before its adapters.
        max_model_len: context limit in tokens; None if it is not reported, and learned from rejections.
    """

    url: str
    models: tuple[str, ...]
    max_model_len: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Servers:
    """OpenAI-compatible servers with vLLM's metrics.

    Attributes:
        api_key_env: environment variable with their API key.
        max_num_seqs: maximum batch size of each, for servers that do not report it; None to learn it.
        is_observed: whether the scheduler only observes at first.
    """

    found: tuple[Server, ...]
    api_key_env: str | None = None
    max_num_seqs: int | None = None
    is_observed: bool = False


Fleet = Emulated | Gpus | Servers


def config_context_limit(model: str) -> int | None:
    """Return the context limit in the `config.json` of a model's folder, or None."""
    try:
        content = json.loads((Path(model).expanduser() / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    stated = content.get("max_position_embeddings") if isinstance(content, dict) else None
    return stated if isinstance(stated, int) else None


# -- discovery of running servers --------------------------------------------------------------------------


class SilentServerError(ServeAppError):
    """Nothing answers at the address of a server."""


def discover_servers(urls: Iterable[str], api_key_env: str | None) -> tuple[Server, ...]:
    """Query each server for its models and limits.

    One that does not answer is assumed to equal the others if these are equal to each other, with a warning.

    Args:
        api_key_env: environment variable with their API key.

    Raises:
        SilentServerError: a server does not answer, and it is unknown what it serves.
        ServeAppError: a server rejects the key, or cannot be used.
    """
    api_key = None
    if api_key_env is not None and not (api_key := os.environ.get(api_key_env)):
        raise SettingsError(
            f"the environment variable {api_key_env} is not set: export the servers' API key in it"
        )
    found: list[Server] = []
    silent: dict[str, SilentServerError] = {}
    for url in urls:
        try:
            found.append(_ask(url, api_key))
        except SilentServerError as exc:
            silent[url.rstrip("/").removesuffix("/v1")] = exc
    different = {(server.models, server.max_model_len) for server in found}
    if silent and len(different) != 1:
        reason = "the servers that respond differ" if found else "no server responds"
        raise SilentServerError(
            f"{'; '.join(map(str, silent.values()))}. What it serves is unknown, because {reason}: "
            "start it first"
        )
    for url, error in silent.items():
        warn(f"{error}; it receives requests once it responds")
        found.append(replace(found[0], url=url))
    return tuple(found)


def _ask(given: str, api_key: str | None) -> Server:
    if not given.startswith(("http://", "https://")):
        raise SettingsError(f"the URL of a server must begin with http:// or https://, got {given!r}")
    url = given.rstrip("/").removesuffix("/v1")

    async def get(path: str) -> PageResponse:
        return _page(f"{url}{path}", api_key)

    try:
        # `get` blocks instead of awaiting, so pages are fetched one by one.
        found = asyncio.run(identify(get))
    except EngineError as exc:
        raise ServeAppError(f"{url}{exc}") from exc
    names = tuple(listing.model for listing in found.models)
    if not names:
        raise ServeAppError(f"{url} serves no model")
    return Server(url=url, models=names, max_model_len=found.limits.max_model_len)


def _page(url: str, api_key: str | None) -> PageResponse:
    try:
        answer = request(url, api_key)
    except ConnectionFailedError as exc:
        reason = getattr(exc.__cause__, "reason", exc.__cause__)
        # Any other reason, such as an unknown host, is more likely to be a mistake in the URL.
        is_silent = isinstance(reason, ConnectionRefusedError | TimeoutError)
        kind = SilentServerError if is_silent else ServeAppError
        raise kind(f"{url} does not respond: {exc}") from exc
    if answer.is_denied:
        raise ServeAppError(
            f"{url} returned {answer}: pass --api-key-env with the environment variable that holds its key"
        )
    return PageResponse(200 if answer.is_success else answer.status, answer.body, {})


# -- pools of vLLM engines on this machine's GPUs ------------------------------------------------------------
#
# If model and GPU are known, engines get the batch size and, unless the user chose it, the context that their
# KV cache can hold.


_SHORT_SEQUENCES = 256
_LONG_SEQUENCES = 64


@dataclass(frozen=True, slots=True)
class _Limits:
    """Limits of one engine, named as in vLLM."""

    max_model_len: int
    max_num_seqs: int
    long_prefill_token_threshold: int = 256


def gpu_models(gpus: Gpus) -> str:
    """Return the list `models`: two pools if the context is long and at least two engines fit."""
    longest = _limits(gpus, gpus.context, _LONG_SEQUENCES).max_model_len
    if longest <= SHORT_CONTEXT or gpus.engines < 2:
        why = _WHY_ONE_ENGINE if gpus.engines < 2 else _WHY_ONE_CONTEXT
        limits = _limits(gpus, gpus.context, _SHORT_SEQUENCES)
        pools = _pool(gpus, "all", limits, gpus.engines, _BATCH)
        return _MODEL.format(name=scalar(gpus.name), why=why, pools=pools)
    long = max(1, gpus.engines // 4)
    short_limits = _limits(gpus, SHORT_CONTEXT, _SHORT_SEQUENCES)
    pools = _pool(gpus, "short", short_limits, gpus.engines - long, _BATCH)
    pools += "    # Long-context pool: each sequence takes more KV cache, so fewer run at once.\n"
    pools += _pool(gpus, "long", _limits(gpus, longest, _LONG_SEQUENCES), long, _BATCH_AGAIN)
    return _MODEL.format(name=scalar(gpus.name), why=_WHY_TWO, pools=pools)


def _limits(gpus: Gpus, context: int, sequences: int) -> _Limits:
    """Return the desired limits, reduced to what the KV cache can hold."""
    wanted = {"max_num_seqs": sequences, "tensor_parallel_size": gpus.per_engine}
    gpu = find_gpu(gpus.gpu) if gpus.gpu is not None else None
    setup = engine_setup(VllmEngineSettings(model=gpus.model, args=wanted), gpu) if gpu is not None else None
    if setup is None:
        return _Limits(context, sequences)
    try:
        held = capacity(setup)
    except SettingsError:
        # The weights do not fit. `check` reports this with a remedy.
        return _Limits(context, sequences)
    if gpus.max_model_len is None:
        context = min(context, max_context(held))
    max_sequences = max(1, held.sequences(typical_tokens(at_most=context)))
    return _Limits(context, min(sequences, max_sequences), held.chunk_tokens)


_MODEL = """\
- name: {name}
  # Other names for the same model: aliases: [gpt-4o-mini]
  pools:
{why}{pools}"""

_WHY_TWO = """\
    # Pools are listed by increasing context. Requests in the first one never wait behind a long prefill. How
    # many engines each pool needs depends on the traffic: the command `plan` computes it from a trace.
"""


_WHY_ONE_ENGINE = """\
    # One pool, because one engine fits. Two engines can share a large GPU: set fractions of num_gpus, and
    # divide its memory with gpu_memory_utilization (example: configs/gpu_1x.yaml).
"""

_WHY_ONE_CONTEXT = """\
    # One pool: a second one pays off only if some requests need a longer context.
"""

_BATCH = """\
            # Maximum batch size: a higher value raises the throughput and makes every token slightly slower.
            max_num_seqs: {limits.max_num_seqs}
            # Tokens of a long prefill per iteration, so that other requests keep decoding. About what the GPU
            # computes while a decode step reads the weights; `calibrate` measures it.
            long_prefill_token_threshold: {limits.long_prefill_token_threshold}
"""

_BATCH_AGAIN = """\
            max_num_seqs: {limits.max_num_seqs}
            long_prefill_token_threshold: {limits.long_prefill_token_threshold}
"""


def _pool(gpus: Gpus, name: str, limits: _Limits, replicas: int, batch: str) -> str:
    parallel = ""
    if gpus.per_engine > 1:
        parallel = f"            tensor_parallel_size: {gpus.per_engine}\n"
    return (
        f"    - name: {name}\n"
        "      engine:\n"
        "        vllm:\n"
        f"          model: {scalar(gpus.model)}\n"
        "          args:\n"
        f"            max_model_len: {limits.max_model_len}\n"
        f"{parallel}{batch.format(limits=limits)}"
        f"      resources: {{num_cpus: 1.0, num_gpus: {gpus.per_engine}}}\n"
        f"      replicas: {replicas}\n"
        "      health_check_timeout_s: 60.0\n"
    )


# -- pools in front of running servers ---------------------------------------------------------------------


def remote_models(servers: Servers) -> str:
    """Return the list `models`: one pool per model and context, ordered by increasing context."""
    of_model: dict[str, list[Server]] = {}
    for server in servers.found:
        of_model.setdefault(server.models[0], []).append(server)
    return "".join(_model(name, found, servers) for name, found in of_model.items())


def _model(name: str, found: list[Server], servers: Servers) -> str:
    pools: dict[int | None, list[Server]] = {}
    for server in sorted(found, key=lambda server: server.max_model_len or math.inf):
        pools.setdefault(server.max_model_len, []).append(server)
    common = set.intersection(*(set(server.models) for server in found))
    aliases = tuple(alias for alias in found[0].models if alias in common - {name})
    return "".join(_lines(name, aliases, pools, servers))


def _lines(
    name: str, aliases: tuple[str, ...], pools: Mapping[int | None, list[Server]], servers: Servers
) -> Iterator[str]:
    yield "# The name that the servers use: request bodies are forwarded unchanged.\n"
    yield f"- name: {scalar(name)}\n"
    if aliases:
        yield f"  aliases: {flow(aliases)}\n"
    yield "  pools:\n"
    contexts = [context for context in pools if context is not None]
    names = _NAMES.get(len(pools)) or tuple(
        "longer" if context is None else f"up-to-{context}" for context in pools
    )
    if len(pools) > 1:
        yield _SHORTER_FIRST
    for pool, (context, found) in zip(names, pools.items(), strict=True):
        yield _remote_pool(pool, context, found, servers)
    if len(pools) > 1 or servers.is_observed:
        yield "  scheduler:\n"
    if servers.is_observed:
        yield "    # Requests are not scheduled until `ewsjf mode active`.\n    active_share: 0.0\n"
    if len(pools) > 1:
        # With more than two pools, contexts are the boundaries. The first pool's boundary has to be set
        # explicitly.
        boundary = min(SHORT_CONTEXT, *contexts) if len(pools) == len(_NAMES) else min(contexts)
        yield (
            "    routing:\n"
            f"      # Prompt plus output tokens up to which {names[0]} is the home pool of a request.\n"
            f"      b_short_tokens: {boundary}\n"
        )


def _remote_pool(name: str, context: int | None, found: list[Server], servers: Servers) -> str:
    key = f"          api_key_env: {scalar(servers.api_key_env)}\n" if servers.api_key_env else ""
    if servers.max_num_seqs is not None:
        key += f"          max_num_seqs: {servers.max_num_seqs}\n"
    urls = "".join(f"            - {scalar(server.url)}\n" for server in found)
    limit = "not reported, so learned from rejections" if context is None else f"{context:,} tokens"
    return _POOL.format(name=name, urls=urls, key=key, context=limit)


_NAMES = {1: ("all",), 2: ("short", "long")}

_SHORTER_FIRST = """\
    # Pools are listed by increasing context. Requests in the first one never wait behind a long prefill.
"""

_POOL = """\
    - name: {name}
      engine:
        remote:
          # Limits are read from each server (context now: {context}).
          # Servers can be added here, or discovered by DNS, from a file or in Kubernetes, also at run time:
          # see docs/put-in-front.md.
          endpoints:
{urls}{key}"""


# -- file --------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class ListenAddress:
    """Listen address of the application, and its start command.

    Attributes:
        start: command that starts it.
        insecure: whether it needs no keys even if other machines can reach it.
    """

    host: str
    port: int
    start: str
    insecure: bool = False


def configuration(fleet: Fleet, place: ListenAddress) -> str:
    """Return the complete file.

    Raises:
        SettingsError: the fleet does not make a valid application.
    """
    if isinstance(fleet, Emulated):
        return _emulated(place)
    title, models = (
        (f"vLLM engines of {fleet.name}: {fleet.engines}, on {fleet.per_engine} GPU each.", gpu_models(fleet))
        if isinstance(fleet, Gpus)
        else ("In front of running servers, which need no changes.", remote_models(fleet))
    )
    return _FRAME.format(
        title=title,
        start=place.start,
        host=scalar(place.host),
        port=place.port,
        models=textwrap.indent(models, " " * 8),
    ) + _gateway(place)


def _gateway(place: ListenAddress) -> str:
    """Return the key settings that an address requires if other machines can reach it."""
    if is_loopback(place.host):
        return ""
    return textwrap.indent(_INSECURE if place.insecure else _KEYS, " " * 6)


def _emulated(place: ListenAddress) -> str:
    text = PACKAGED_CONFIG.read_text(encoding="utf-8") + _gateway(place)
    started = next(line for line in text.splitlines() if line.startswith("#   scripts/serve"))
    for old, new in (
        (started, f"#   {place.start}"),
        ("host: 127.0.0.1", f"host: {scalar(place.host)}"),
        ("port: 8000", f"port: {place.port}"),
    ):
        text = text.replace(old, new, 1)
    return text


_FRAME = """\
# {title}
#   {start}
# Gateways listen on this address; Ray Serve runs no proxy.
proxy_location: Disabled
http_options:
  # Listen on loopback only. Other addresses, such as 0.0.0.0, require keys next to `models`:
  # gateway: {{keys: [{{tenant: app, env: EWSJF_API_KEY_APP}}]}}
  host: {host}
  port: {port}
logging_config:
  # The gateway writes its own log line per request.
  enable_access_log: false
applications:
  - name: ewsjf
    route_prefix: /
    import_path: serve_app.app:build_app
    args:
      models:
{models}      # Where learned state is persisted. Without it, every start learns from scratch.
      # state_uri: /var/lib/ewsjf
      # One gateway handles some thousand requests/s. Ray only counts num_cpus and enforces no limit.
      gateways: {{replicas: 1, num_cpus: 0.2}}
"""

KEY_VARIABLE = "EWSJF_API_KEY_APP"
_KEYS = f"""\
gateway:
  # Set this environment variable of `serve` to the secret. Each key has a tenant, and optionally classes.
  keys: [{{tenant: app, env: {KEY_VARIABLE}, may_act_for_tenants: true}}]
"""
_INSECURE = """\
gateway:
  # Clients need no key: a proxy in front has to authenticate them.
  insecure: true
"""
