"""Validation of a configuration before Ray starts: all mistakes in a file, with line numbers.

- `check_file`: all checks, in order: file, Ray Serve's keys, settings, engines, this machine.
- `Document`: a YAML file with the lines of its keys. PyYAML's nodes have line numbers and its plain values do
  not, so a file is composed into nodes as well. Duplicate keys are rejected, because PyYAML would silently
  use the last one.
- `check_serve_keys`: the keys around `args`. Ray Serve ignores unknown keys, so a misspelled `port` would go
  unnoticed. The names are listed here because importing Serve takes seconds; a test compares them with the
  installed release.
- `check_engines`: vLLM's arguments by its own parser, model folders; `check_endpoints`: remote servers.
- `check_capacity`: the capacity of vLLM engines, against the context and sequences that a configuration
  requires. The values are computed by `roofline.capacity`, not measured. So the results are warnings, and
  there are none if the model, the GPU or the memory of an argument is not known.
- `check_machine`: cores, GPUs and memory, besides the free port.
"""

import asyncio
import contextlib
import difflib
import errno
import os
import re
import shutil
import socket
import subprocess
from collections.abc import Container, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import fsspec
import psutil
import yaml

from serve_app.engines.model.hardware import Gpu, ModelArchitecture, find_architecture, find_gpu, load_gpu
from serve_app.engines.model.roofline import (
    EngineSetup,
    kv_tokens,
    max_context,
    memory_share,
    min_tensor_parallel,
    typical_tokens,
)
from serve_app.engines.vllm.engine import VllmEngineSettings
from serve_app.errors import EngineError, SettingsError
from serve_app.serving.api_keys import KeysFileError, read_keys
from serve_app.serving.remote.endpoint import unusable_endpoints
from serve_app.serving.remote.sources import FixedSource, source_of
from serve_app.settings.application import (
    IMPORT_PATH,
    ApplicationSettings,
    PoolSettings,
    find_application,
    http_address,
    settings_of,
    with_port,
)

# Matches the steps of a path such as `models[0].pools[1].name` at the beginning of a sentence.
_STEP = re.compile(r"([A-Za-z_][\w-]*)|\[(\d+)\]")

Step = str | int


@dataclass(frozen=True, slots=True)
class Mistake:
    """A mistake and its line number in the file, from 1; None if no line is at fault."""

    message: str
    line: int | None = None

    def located(self, path: Path) -> str:
        """Return the message in the format of compilers, so that editors can jump to the line."""
        place = f"{path}:{self.line}" if self.line is not None else str(path)
        return f"{place}: {self.message}"


class UnreadableError(Exception):
    """The file is missing or not YAML."""

    def __init__(self, mistake: Mistake) -> None:
        super().__init__(mistake.message)
        self.mistake = mistake


class Document:
    """A YAML file.

    Attributes:
        content: plain value of the file.
        mistakes: duplicate keys.

    Raises:
        UnreadableError: the file cannot be read.
    """

    def __init__(self, path: Path) -> None:
        try:
            text = path.read_text(encoding="utf-8")
        except FileNotFoundError:
            raise UnreadableError(Mistake(f"file not found{_other_files(path)}")) from None
        except (OSError, UnicodeDecodeError) as exc:
            raise UnreadableError(Mistake(f"cannot be read: {exc}")) from exc
        try:
            self._root = yaml.compose(text, Loader=yaml.SafeLoader)
            self.content: Any = yaml.safe_load(text)
        except yaml.MarkedYAMLError as exc:
            raise UnreadableError(_syntax_error(exc)) from exc
        except (yaml.YAMLError, ValueError) as exc:
            raise UnreadableError(Mistake(f"is not valid YAML: {exc}")) from exc
        except RecursionError as exc:
            raise UnreadableError(Mistake("is nested too deeply for a configuration")) from exc
        self.mistakes = [] if self._root is None else list(_duplicate_keys(self._root, set()))

    def line(self, steps: tuple[Step, ...]) -> int | None:
        """Return the line of the value under these keys, or of the innermost existing one."""
        node, line = self._root, None
        for step in steps:
            found = _below(node, step)
            if found is None:
                break
            node, line = found
        return line

    def mistake(self, before: tuple[Step, ...], sentence: str) -> Mistake:
        """Create a mistake from a sentence that begins with a setting's path, relative to `before`."""
        return Mistake(sentence, self.line((*before, *_steps(sentence))))


def _other_files(path: Path) -> str:
    """Return the configurations in the folder of a missing one."""
    folder = path.parent
    beside = sorted(each.name for each in folder.glob("*.y*ml")) if folder.is_dir() else []
    return f": {folder} has {', '.join(beside)}" if beside else ""


def _syntax_error(error: yaml.MarkedYAMLError) -> Mistake:
    mark = error.problem_mark or error.context_mark
    line = mark.line + 1 if mark is not None else None
    if isinstance(error, yaml.composer.ComposerError) and "single document" in (error.context or ""):
        return Mistake("has several documents: remove this `---`, and what belongs to another file", line)
    what = error.problem or error.context or "syntax error"
    advice = ""
    if "\\t" in what:
        advice = ": indent with spaces"
    elif "mapping values are not allowed" in what:
        advice = ": check the indentation of the lines above, and quote texts with a colon"
    return Mistake(f"is not valid YAML: {what}{advice}", line)


def _steps(sentence: str) -> Iterator[Step]:
    """Parse the keys of the path with which a sentence begins."""
    path = sentence.split(" ", 1)[0].rstrip(":,")
    for key, number in _STEP.findall(path):
        yield int(number) if number else key


def _below(node: yaml.Node | None, step: Step) -> tuple[yaml.Node, int] | None:
    if isinstance(node, yaml.MappingNode):
        for key, value in node.value:
            if key.value == step:
                return value, key.start_mark.line + 1
        for merged in (value for key, value in node.value if key.value == "<<"):
            if (found := _below(merged, step)) is not None:
                return found
    elif isinstance(node, yaml.SequenceNode) and isinstance(step, int) and step < len(node.value):
        found = node.value[step]
        return found, found.start_mark.line + 1
    return None


def _duplicate_keys(node: yaml.Node, anchored: set[int]) -> Iterator[Mistake]:
    if id(node) in anchored:
        return
    anchored.add(id(node))
    if isinstance(node, yaml.MappingNode):
        seen: dict[str, int] = {}
        for key, value in node.value:
            line = key.start_mark.line + 1
            if key.value in seen:
                yield Mistake(
                    f"{key.value} is duplicated in this block, first in line {seen[key.value]}: remove one",
                    line,
                )
            seen[key.value] = line
            yield from _duplicate_keys(value, anchored)
    elif isinstance(node, yaml.SequenceNode):
        for each in node.value:
            yield from _duplicate_keys(each, anchored)


TOP = frozenset(
    {
        *("proxy_location", "http_options", "grpc_options", "controller_options", "logging_config"),
        *("tracing_config", "applications", "target_capacity"),
    }
)
HTTP_OPTIONS = frozenset(
    {
        *("host", "port", "root_path", "request_timeout_s", "keep_alive_timeout_s"),
        *("ssl_keyfile", "ssl_certfile", "ssl_keyfile_password", "ssl_ca_certs"),
    }
)
GRPC_OPTIONS = frozenset({"port", "grpc_servicer_functions", "request_timeout_s", "enable_reflection"})
LOGGING_CONFIG = frozenset(
    {"encoding", "log_level", "logs_dir", "enable_access_log", "additional_log_standard_attrs"}
)
APPLICATION = frozenset(
    {
        *("name", "route_prefix", "import_path", "runtime_env", "host", "port", "deployments"),
        *("autoscaling_policy", "args", "logging_config", "external_scaler_enabled"),
    }
)
NO_PROXY = "Disabled"

_BLOCKS: Mapping[str, frozenset[str]] = {
    "http_options": HTTP_OPTIONS,
    "grpc_options": GRPC_OPTIONS,
    "logging_config": LOGGING_CONFIG,
}
_MAX_PORT = 65_535


def check_serve_keys(document: Document, import_path: str) -> Iterator[Mistake]:
    """Yield mistakes outside `args`: unknown keys, wrong types, none or several matching applications."""
    content = document.content
    if not isinstance(content, Mapping):
        yield Mistake("is not a Ray Serve configuration: it must have a list `applications`")
        return
    yield from _unknown(document, content, (), TOP)
    for block, known in _BLOCKS.items():
        value = content.get(block)
        if value is not None and not isinstance(value, Mapping):
            yield _at(document, (block,), f"must be a mapping of settings, got {value!r}")
        elif value is not None:
            yield from _unknown(document, value, (block,), known)
    yield from _check_values(document, content)
    yield from _check_applications(document, content, import_path)


def _check_values(document: Document, content: Mapping[str, Any]) -> Iterator[Mistake]:
    if (location := content.get("proxy_location")) != NO_PROXY:
        yield _at(
            document,
            ("proxy_location",),
            f"must be {NO_PROXY}, because gateways listen on http_options.port themselves, got {location!r}",
        )
    for block in ("http_options", "grpc_options"):
        options = content.get(block)
        if not isinstance(options, Mapping):
            continue
        port = options.get("port", 8000)
        if isinstance(port, bool) or not isinstance(port, int) or not 0 < port <= _MAX_PORT:
            yield _at(
                document, (block, "port"), f"must be a whole number from 1 to {_MAX_PORT}, got {port!r}"
            )
        host = options.get("host", "")
        if block == "http_options" and options.get("request_timeout_s"):
            yield _at(document, (block, "request_timeout_s"), "is not supported: use queue_timeout_s instead")
        if not isinstance(host, str):
            yield _at(document, (block, "host"), f"must be a string such as 127.0.0.1, got {host!r}")


def _check_applications(
    document: Document, content: Mapping[str, Any], import_path: str
) -> Iterator[Mistake]:
    applications = content.get("applications")
    if not isinstance(applications, list):
        yield _at(document, ("applications",), f"must be a list, got {applications!r}")
        return
    ours = 0
    for number, application in enumerate(applications):
        where: tuple[Step, ...] = ("applications", number)
        if not isinstance(application, Mapping):
            yield _at(document, where, f"must be a mapping of settings, got {application!r}")
            continue
        yield from _unknown(document, application, where, APPLICATION)
        found = application.get("import_path")
        if found == import_path:
            ours += 1
        elif found is None:
            yield _at(document, where, f"has no import_path: add import_path: {import_path}")
        elif len(applications) == 1 and not _is_extension(found):
            advice = f"must be {import_path}, or MODULE:NAME of an extension, got {found!r}"
            yield _at(document, (*where, "import_path"), advice)
    if ours != 1 and len(applications) != 1:
        advice = f"exactly one entry must have import_path: {import_path}, got {ours}"
        yield _at(document, ("applications",), advice)


def _is_extension(import_path: object) -> bool:
    """Return whether it may be the import path of an application in another package."""
    if not isinstance(import_path, str) or import_path.startswith("serve_app."):
        return False
    module, _, name = import_path.partition(":")
    return bool(module and name)


def _unknown(
    document: Document, given: Mapping[Any, Any], where: tuple[Step, ...], known: frozenset[str]
) -> Iterator[Mistake]:
    for key in given:
        if key in known:
            continue
        near = difflib.get_close_matches(str(key), known, n=1)
        advice = f"did you mean {near[0]}?" if near else f"known keys: {', '.join(sorted(known))}"
        yield _at(document, (*where, key), f"is unknown to Ray Serve: {advice}")


def _at(document: Document, where: tuple[Step, ...], what: str) -> Mistake:
    path = ""
    for step in where:
        path += f"[{step}]" if isinstance(step, int) else f".{step}" if path else str(step)
    return Mistake(f"{path} {what}", document.line(where))


# A name on the model hub has the form owner/name.
_HUB_STEPS = 2


def check_engines(settings: ApplicationSettings, *, on_this_machine: bool) -> Iterator[str]:
    """Yield a sentence for each engine that cannot start, beginning with the path of the setting."""
    seen: set[str] = set()
    for path, pool in _pools(settings):
        where, engine = f"{path}.engine.vllm", pool.engine.vllm
        if engine is None:
            continue
        if on_this_machine:
            yield from _check_model(where, engine)
        for sentence in _check_args(where, engine):
            # Pools often share their arguments, so report the same error only once.
            if sentence.partition(": ")[2] not in seen:
                seen.add(sentence.partition(": ")[2])
                yield sentence


def check_endpoints(settings: ApplicationSettings, *, probe: bool) -> Iterator[str]:
    """Yield a sentence for each endpoint in two pools of a model and, with `probe`, for each unusable one."""
    first_pool: dict[tuple[str, str], str] = {}
    for path, pool in _pools(settings):
        remote, failures = pool.engine.remote, dict[str, str]()
        if remote is None:
            continue
        where, model = f"{path}.engine.remote", path.partition(".")[0]
        if probe:
            try:
                failures = asyncio.run(unusable_endpoints(remote))
            except EngineError as exc:
                yield f"{where}.api_key_env: {exc}"
        for index, text in enumerate(remote.endpoints):
            source = source_of(text)
            url = str(source.url) if isinstance(source, FixedSource) else text
            if (other := first_pool.setdefault((model, url), pool.name)) != pool.name:
                yield (
                    f"{where}.endpoints[{index}]: {text} is an endpoint of pool {other} too, so its "
                    "capacity would count twice: remove it from one of the pools"
                )
            if url in failures:
                yield f"{where}.endpoints[{index}]: {failures[url]}"


def _pools(settings: ApplicationSettings) -> Iterator[tuple[str, PoolSettings]]:
    """Yield each pool with the path of its settings."""
    for number, model in enumerate(settings.models):
        for place, pool in enumerate(model.pools):
            yield f"models[{number}].pools[{place}]", pool


def _check_model(where: str, engine: VllmEngineSettings) -> Iterator[str]:
    """Check that a model folder exists. Names on the hub are not checked unless the hub is disabled."""
    model = engine.model
    folder = Path(model).expanduser()
    if folder.exists():
        if folder.is_dir() and not any(folder.glob("*.json")) and not any(folder.glob("*.gguf")):
            yield f"{where}.model: folder {model} has no config.json"
        return
    first = Path(model).parts[0]
    looks_like_a_path = model.startswith(("/", ".", "~")) or len(Path(model).parts) != _HUB_STEPS
    if looks_like_a_path or Path(first).is_dir():
        yield f"{where}.model: folder {model} does not exist in {Path.cwd()}{_sibling_folders(folder)}"
    elif _is_offline(engine) and not _is_cached(model):
        yield (
            f"{where}.model: {model} is not a folder, and HF_HUB_OFFLINE disables the model hub: "
            "download the model first, or remove HF_HUB_OFFLINE"
        )


def _sibling_folders(folder: Path) -> str:
    parent = folder.parent
    if not parent.is_dir():
        return ""
    names = sorted(each.name for each in parent.iterdir() if each.is_dir())
    return f"; {parent} has {', '.join(names)}" if names else f"; {parent} is empty"


def _is_offline(engine: VllmEngineSettings) -> bool:
    value = str(engine.env.get("HF_HUB_OFFLINE", os.environ.get("HF_HUB_OFFLINE", "")))
    return value.lower() in {"1", "true", "yes", "on"}


def _is_cached(model: str) -> bool:
    """Return whether the hub's cache on this machine has the model."""
    home = Path(os.environ.get("HF_HOME", "~/.cache/huggingface")).expanduser()
    cache = Path(os.environ.get("HF_HUB_CACHE", home / "hub"))
    return (cache / f"models--{model.replace('/', '--')}").is_dir()


def _check_args(where: str, engine: VllmEngineSettings) -> Iterator[str]:
    try:
        engine.check()
    except (SettingsError, EngineError) as exc:
        sentence = str(exc)
        separator = "." if sentence.startswith("args.") else ": "
        yield f"{where}{separator}{sentence}"


# Defaults of vLLM 0.32 and 0.33: share of the memory, and tokens and sequences of a batch by GPU.
_MEMORY_UTILIZATION = 0.92
_HUGE_GIB, _LARGE_GIB = 160, 70
_HUGE_BATCH, _LARGE_BATCH, _DEFAULT_BATCH = (16_384, 1_024), (8_192, 1_024), (2_048, 256)

_WEIGHT_BYTES: Mapping[str, float] = {
    **dict.fromkeys(("bfloat16", "float16", "half"), 2.0),
    **dict.fromkeys(("float32", "float"), 4.0),
}
_KV_BYTES: Mapping[str, float] = {
    **dict.fromkeys(("fp8", "fp8_e4m3", "fp8_e5m2"), 1.0),
    **dict.fromkeys(("bfloat16", "float16"), 2.0),
}
# Arguments that affect memory, or its division, in ways that are not modelled.
_NOT_MODELLED = (
    *("quantization", "pipeline_parallel_size", "data_parallel_size", "decode_context_parallel_size"),
    *("prefill_context_parallel_size", "cpu_offload_gb", "speculative_config", "enable_lora"),
    *("num_gpu_blocks_override", "hf_overrides", "kv_offloading_size"),
)

_FP8_BYTES = 1.0


def engine_setup(engine: VllmEngineSettings, gpu: str) -> EngineSetup | None:
    """Return the model, GPUs and memory-related arguments of an engine; None if any of them is not known."""
    if any(engine.args.get(name) not in (None, False, 0, 1) for name in _NOT_MODELLED):
        return None
    figures = load_gpu(gpu)
    model = _model(engine)
    tokens, sequences = _batch(gpu, figures)
    share = engine.args.get("gpu_memory_utilization", _MEMORY_UTILIZATION)
    counts = {
        "tensor_parallel": positive_argument(engine, "tensor_parallel_size", 1),
        "max_num_seqs": positive_argument(engine, "max_num_seqs", sequences),
        "max_num_batched_tokens": positive_argument(engine, "max_num_batched_tokens", tokens),
    }
    if model is None or not isinstance(share, float | int):
        return None
    given = {name: count for name, count in counts.items() if count is not None}
    if len(given) < len(counts):
        return None
    try:
        return EngineSetup(
            model=model,
            gpu=figures,
            gpu_memory_utilization=float(share),
            kv_cache_memory_bytes=positive_argument(engine, "kv_cache_memory_bytes", None),
            **given,
        )
    except ValueError:
        # vLLM rejects these as well and reports why.
        return None


def positive_argument(engine: VllmEngineSettings, name: str, default: int | None) -> int | None:
    """Return a positive integer argument or the default; None if vLLM chooses the value (`auto`, -1)."""
    value = engine.args.get(name, default)
    is_number = isinstance(value, int) and not isinstance(value, bool)
    return value if is_number and value > 0 else None


def _model(engine: VllmEngineSettings) -> ModelArchitecture | None:
    model = find_architecture(engine.model)
    if model is None:
        return None
    dtype, kv_dtype = str(engine.args.get("dtype", "auto")), str(engine.args.get("kv_cache_dtype", "auto"))
    weight_bytes = model.weight_bytes if dtype == "auto" else _WEIGHT_BYTES.get(dtype)
    kv_bytes = weight_bytes if kv_dtype == "auto" else _KV_BYTES.get(kv_dtype)
    if weight_bytes is None or kv_bytes is None:
        return None
    return replace(model, weight_bytes=weight_bytes, kv_bytes=kv_bytes)


def _batch(name: str, gpu: Gpu) -> tuple[int, int]:
    """Return vLLM's default tokens and sequences of a batch for a GPU."""
    if gpu.memory_gib >= _HUGE_GIB:
        return _HUGE_BATCH
    if gpu.memory_gib >= _LARGE_GIB and name != "a100":
        return _LARGE_BATCH
    return _DEFAULT_BATCH


@dataclass(frozen=True, slots=True, kw_only=True)
class _VllmPool:
    """A pool of vLLM engines whose model and GPU are known.

    Attributes:
        where: path of the pool's settings.
        held: tokens that the KV cache holds.
        on: description of the GPUs.
    """

    where: str
    pool: PoolSettings
    engine: VllmEngineSettings
    setup: EngineSetup
    held: int
    on: str


def check_capacity(settings: ApplicationSettings, gpu: str | None = None) -> Iterator[str]:
    """Yield a sentence for each limit that an engine cannot reach, starting with the setting's path.

    Args:
        gpu: GPU of pools without `resources.accelerator_type`; None if not known.
    """
    for where, pool in _pools(settings):
        engine, given = pool.engine.vllm, pool.resources.accelerator_type or gpu
        name = find_gpu(given) if given is not None and pool.resources.num_gpus else None
        setup = engine_setup(engine, name) if engine is not None and name is not None else None
        if engine is None or setup is None:
            continue
        on = f"{setup.tensor_parallel} x {name}"
        try:
            held = kv_tokens(setup)
        except SettingsError as exc:
            yield f"{where}.engine.vllm.args: on {on} {exc}"
            continue
        here = _VllmPool(where=where, pool=pool, engine=engine, setup=setup, held=held, on=on)
        yield from _check_sharing(here)
        yield from _check_context(here)
        yield from _check_sequences(here)


def _check_sharing(here: _VllmPool) -> Iterator[str]:
    """Check that engines with fractions of `num_gpus` use no more memory than that share."""
    share, claimed = here.pool.resources.num_gpus, memory_share(here.setup)
    if share < 1 and claimed > share:
        yield (
            f"{here.where}.resources.num_gpus: an engine with {share:g} of a GPU uses about "
            f"{claimed:.0%} of its memory ({here.on}), so engines that share a GPU may not fit: lower "
            "gpu_memory_utilization or kv_cache_memory_bytes, or raise num_gpus"
        )


def _check_context(here: _VllmPool) -> Iterator[str]:
    """Check that the KV cache holds the context. vLLM would reject it only minutes after the start."""
    setup, held = here.setup, here.held
    wanted = positive_argument(here.engine, "max_model_len", setup.model.max_context_len)
    if wanted is None or wanted <= held:
        return
    remedies = []
    if (gpus := min_tensor_parallel(setup, wanted)) is not None:
        remedies.append(f"set tensor_parallel_size to {gpus}")
    halved = replace(setup, model=replace(setup.model, kv_bytes=_FP8_BYTES))
    if setup.model.kv_bytes > _FP8_BYTES and kv_tokens(halved) >= wanted:
        remedies.append("set kv_cache_dtype to fp8")
    remedies.append(f"or lower max_model_len to {max_context(held)}")
    yield (
        f"{here.where}.engine.vllm.args.max_model_len: a context of {wanted:,} tokens exceeds the KV "
        f"cache of about {held:,} tokens that {here.on} have besides the weights, so vLLM will not "
        f"start: {', '.join(remedies)}"
    )


def _check_sequences(here: _VllmPool) -> Iterator[str]:
    """Check `max_num_seqs` for sequences of typical length, which pools of longer ones receive by spill."""
    wanted = positive_argument(here.engine, "max_num_seqs", None)
    usual = typical_tokens(at_most=positive_argument(here.engine, "max_model_len", None))
    most = max(1, here.held // usual)
    if wanted is not None and wanted > most:
        yield (
            f"{here.where}.engine.vllm.args.max_num_seqs: {wanted} sequences of typically {usual:,} "
            f"tokens need {wanted * usual:,} tokens of KV cache, but {here.on} have about "
            f"{here.held:,} besides the weights: lower it to {most}, or use more GPUs per engine"
        )


# CPUs reserved for the scheduler and the tuner of each model, see `serve_app.app`.
_CPUS_PER_MODEL = 0.2
# Memory of a vLLM engine besides weights and KV cache: three Python processes with torch.
_VLLM_PROCESSES_GIB = 2.5
_GIB = 2**30


def check_machine(
    document: Document, args: tuple[Step, ...], settings: ApplicationSettings, *, is_running: bool
) -> Iterator[Mistake]:
    """Yield what is missing. `args` is the path of the application's arguments in the document."""
    yield from _check_cpus(document, settings)
    yield from _check_gpus(document, args, settings)
    yield from _check_nodes(document, args, settings)
    if not is_running:
        yield from _check_memory(document, args, settings)


def _check_port(document: Document, host: str, port: int) -> Iterator[Mistake]:
    """Check that the application's port is free."""
    at_host, at_port = (document.line(("http_options", key)) for key in ("host", "port"))
    try:
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind((host, port))
            probe.listen(1)
    except OverflowError:
        return  # check_serve_keys reports the port
    except (socket.gaierror, TypeError, UnicodeError) as exc:
        yield Mistake(f"http_options.host {host!r} is not an address of this machine: {exc}", at_host)
    except PermissionError:
        yield Mistake(f"http_options.port {port} needs root privileges: choose a port above 1023", at_port)
    except OSError as exc:
        if exc.errno == errno.EADDRINUSE:
            yield Mistake(
                f"http_options.port {port} is in use{listening_process(port)}: stop that program, or choose "
                "another port, such as with `serve --port`",
                at_port,
            )
        else:
            yield Mistake(f"cannot listen on http_options.host {host!r}: {exc.strerror}", at_host)


def listening_process(port: int) -> str:
    """Return the process that listens on a port as the end of a sentence; empty if none or not permitted."""
    try:
        for connection in psutil.net_connections("tcp"):
            is_it = connection.status == psutil.CONN_LISTEN and connection.laddr[1:] == (port,)
            if is_it and connection.pid:
                return f" by {psutil.Process(connection.pid).name()} (process {connection.pid})"
    except (psutil.Error, OSError):
        return ""
    return ""


def _check_cpus(document: Document, settings: ApplicationSettings) -> Iterator[Mistake]:
    there = os.cpu_count() or 1
    needed = settings.gateways.initial_replicas * settings.gateways.num_cpus
    needed += _CPUS_PER_MODEL * len(settings.models)
    needed += sum(pool.num_cpus * _replicas(pool) for _, pool in _pools(settings))
    if needed > there + 1e-9:
        yield Mistake(
            f"the deployments reserve {needed:g} CPU cores, but this machine has {there}: lower num_cpus "
            "of pools (resources.num_cpus) or gateways; it reserves cores but enforces no limit",
            document.line(("applications",)),
        )


def _check_gpus(
    document: Document, args: tuple[Step, ...], settings: ApplicationSettings
) -> Iterator[Mistake]:
    needed = sum(pool.gpus_per_replica * _replicas(pool) for _, pool in _pools(settings))
    if not needed:
        return
    there = gpu_names()
    if needed > len(there) + 1e-9:
        first = next(where for where, pool in _pools(settings) if pool.gpus_per_replica)
        yield Mistake(
            f"the pools need {needed:g} GPUs, but this machine has {len(there) or 'none'}: use fewer "
            "replicas, fractions of num_gpus, or a cluster (`--address`)",
            document.line((*args, *_steps(f"{first}.resources.num_gpus"))),
        )


def _check_nodes(
    document: Document, args: tuple[Step, ...], settings: ApplicationSettings
) -> Iterator[Mistake]:
    for where, pool in _pools(settings):
        bundles = len(pool.resources.placement_bundles)
        if bundles > 1 and pool.resources.placement_strategy == "STRICT_SPREAD":
            yield Mistake(
                f"STRICT_SPREAD needs {bundles} nodes per replica, but this is one machine: use a "
                "cluster (`--address`)",
                document.line((*args, *_steps(f"{where}.resources.advanced.placement_strategy"))),
            )


def gpu_names() -> list[str]:
    """Return the GPUs that NVIDIA's driver lists on this machine."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return []
    command = [program, "--query-gpu=name", "--format=csv,noheader"]
    try:
        # The driver's program, as found on the path.
        listed = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True)  # noqa: S603
    except (subprocess.SubprocessError, OSError):
        return []
    return [line.strip() for line in listed.stdout.splitlines() if line.strip()]


def single_gpu_name() -> str | None:
    """Return the name of this machine's GPUs; None if there are none or different ones."""
    names = set(gpu_names())
    return names.pop() if len(names) == 1 else None


def _check_memory(
    document: Document, args: tuple[Step, ...], settings: ApplicationSettings
) -> Iterator[Mistake]:
    """Check the memory of engines without a GPU. Engines with one use little memory of the host."""
    needed, unlimited = 0.0, None
    for where, pool in _pools(settings):
        engine = pool.engine.vllm
        if engine is None or pool.resources.num_gpus:
            continue
        kv_gib = _kv_gib(engine)
        if kv_gib is None:
            unlimited = unlimited or where
        else:
            needed += _replicas(pool) * (kv_gib + _weights_gib(engine) + _VLLM_PROCESSES_GIB)
    there = psutil.virtual_memory().total / _GIB
    if unlimited is not None:
        yield Mistake(
            'engines without a GPU need env: {VLLM_CPU_KVCACHE_SPACE: "1"} (GiB of KV cache): '
            f"by default vLLM takes most of the {there:.0f} GiB of this machine",
            document.line((*args, *_steps(f"{unlimited}.engine.vllm.env"))),
        )
    if needed > there:
        yield Mistake(
            f"vLLM engines need about {needed:.0f} GiB of memory, but this machine has {there:.0f}: use "
            "fewer engines, a smaller model or less VLLM_CPU_KVCACHE_SPACE",
            document.line(("applications",)),
        )


def _kv_gib(engine: VllmEngineSettings) -> float | None:
    if engine.timed is not None:
        return 0.0  # it stores nothing
    value = engine.env.get("VLLM_CPU_KVCACHE_SPACE", os.environ.get("VLLM_CPU_KVCACHE_SPACE"))
    try:
        return None if value is None else float(value)
    except ValueError:
        return None


def _weights_gib(engine: VllmEngineSettings) -> float:
    folder = Path(engine.model)
    is_loaded = folder.is_dir() and engine.timed is None
    stored = sum(each.stat().st_size for each in folder.glob("*.safetensors")) if is_loaded else 0
    # Weights are usually stored with two bytes each.
    return stored * (2 if engine.args.get("dtype") == "float32" else 1) / _GIB


def _replicas(pool: PoolSettings) -> int:
    """Return the number of replicas that must run from the start."""
    if pool.autoscaling is not None:
        return max(pool.autoscaling.min_replicas, 1)
    return pool.replicas or 1


@dataclass(slots=True)
class CheckResult:
    """Result of a check.

    Attributes:
        mistakes: errors that prevent a start.
        warnings: limits that an engine cannot reach according to the capacity model; they do not prevent a
            start.
        content: the whole file as plain values; empty if it cannot be read.
        settings: settings of this project's application; None if they have mistakes.
    """

    mistakes: list[Mistake] = field(default_factory=list)
    warnings: list[Mistake] = field(default_factory=list)
    content: Mapping[str, Any] = field(default_factory=dict)
    settings: ApplicationSettings | None = None


def check_file(
    path: Path,
    *,
    on_this_machine: bool = True,
    gpu: str | None = None,
    port: int | None = None,
    own_ports: Container[int] = (),
    probe: bool = False,
) -> CheckResult:
    """Return all mistakes in a configuration that can be found before Ray starts.

    Args:
        on_this_machine: also check ports, cores, GPUs, memory and model folders; False for a configuration
            that another machine or a cluster runs.
        gpu: GPU of the engines; None for this machine's if it runs the configuration.
        port: the application's port, instead of the file's.
        own_ports: ports of running applications of this project, which a configuration may change: then its
            port and the free memory are not checked.
        probe: also query the endpoints of remote pools that are configured as URLs.
    """
    found = CheckResult()
    try:
        document = Document(path)
    except UnreadableError as exc:
        found.mistakes.append(exc.mistake)
        return found
    found.mistakes += [*document.mistakes, *check_serve_keys(document, IMPORT_PATH)]
    if not isinstance(document.content, Mapping):
        return found
    found.content = document.content = with_port(document.content, port)
    try:
        number, application = find_application(document.content)
    except SettingsError:
        return found  # check_serve_keys reports it
    where: tuple[Step, ...] = ("applications", number, "args")
    try:
        found.settings = settings_of(application.get("args", {}))
    except SettingsError as exc:
        found.mistakes += [document.mistake(where, sentence) for sentence in str(exc).splitlines()]
        return found
    found.mistakes += [
        document.mistake(where, sentence)
        for sentence in (
            *check_engines(found.settings, on_this_machine=on_this_machine),
            *check_endpoints(found.settings, probe=probe),
        )
    ]
    address = None
    with contextlib.suppress(AttributeError, TypeError, ValueError):  # check_serve_keys reports these
        address = http_address(document.content)
        found.mistakes += _exposure(document, found.settings, address[0])
    gpu = gpu or (single_gpu_name() if on_this_machine else None)
    found.warnings += [document.mistake(where, sentence) for sentence in check_capacity(found.settings, gpu)]
    if on_this_machine:
        found.warnings += [document.mistake(where, sentence) for sentence in _budgets(found.settings)]
        is_running = address is not None and address[1] in own_ports
        if address is not None and not is_running:
            found.mistakes += _check_port(document, *address)
        found.mistakes += check_machine(document, where, found.settings, is_running=is_running)
        sentences = (*_state(found.settings), *_tracing(found.settings), *_login_keys(found.settings))
        found.mistakes += [document.mistake(where, sentence) for sentence in sentences]
    return found


def _state(settings: ApplicationSettings) -> Iterator[str]:
    """Check that the client package for the store of learned state is installed."""
    if settings.state_uri is None:
        return
    try:
        fsspec.get_filesystem_class(fsspec.utils.get_protocol(settings.state_uri))
    except (ImportError, ValueError) as exc:
        # The error names the missing package.
        yield f"state_uri {settings.state_uri} cannot be used here: {exc}"


def _budgets(settings: ApplicationSettings) -> Iterator[str]:
    """Check that the counts of keys and groups with a budget survive a restart."""
    path, jwt = settings.gateway.keys_path, settings.gateway.jwt
    if settings.state_uri is not None:
        return
    groups = () if jwt is None else jwt.groups
    limited = [each.name for each in groups if each.record("any", "any", each.highest_class).has_budget]
    if limited:
        yield (
            "gateway.jwt.groups: without a state_uri, each start counts the budget of the groups "
            f"{', '.join(limited)} from zero: set state_uri"
        )
    if path is None:
        return
    with contextlib.suppress(KeysFileError):  # a gateway waits for a valid file
        keys = [key.id for key in read_keys(path) if key.has_budget and key.revoked_at is None]
        if keys:
            yield (
                f"gateway.keys_file {path}: without a state_uri, each start counts the budget of the keys "
                f"{', '.join(keys)} from zero: set state_uri"
            )


def _tracing(settings: ApplicationSettings) -> Iterator[str]:
    """Check that OpenTelemetry is installed here and supports the configured tracing."""
    try:
        settings.gateway.check_tracing()
    except SettingsError as exc:
        yield str(exc)


def _login_keys(settings: ApplicationSettings) -> Iterator[str]:
    """Check that the file of the login server's public keys has some."""
    if settings.gateway.jwt is None or settings.gateway.jwt.jwks_file is None:
        return
    from serve_app.serving.gateway.logins import keys_in  # noqa: PLC0415 - as in gateways

    try:
        keys_in(Path(settings.gateway.jwt.jwks_file))
    except SettingsError as exc:
        yield str(exc)


def _exposure(document: Document, settings: ApplicationSettings, host: str) -> Iterator[Mistake]:
    try:
        settings.gateway.check_exposure(host)
    except SettingsError as exc:
        yield Mistake(str(exc), document.line(("http_options", "host")))
