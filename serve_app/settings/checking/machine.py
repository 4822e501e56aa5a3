"""Checks of this machine against a configuration: free ports, cores, GPUs and memory."""

import os
import shutil
import socket
import subprocess
from collections.abc import Container, Iterator, Mapping
from pathlib import Path
from typing import Any

import psutil

from serve_app.engines.vllm.engine import VllmEngineSettings
from serve_app.settings.address import http_address
from serve_app.settings.application import ApplicationSettings, PoolSettings
from serve_app.settings.checking.document import Step

# CPUs reserved for the scheduler and the tuner of each model, see `serve_app.app`.
_CPUS_PER_MODEL = 0.2
# Memory of a vLLM engine besides weights and KV cache: three Python processes with torch.
_VLLM_PROCESSES_GIB = 2.5
_GIB = 2**30

Found = tuple[tuple[Step, ...], str]


def check_machine(
    content: Mapping[str, Any], settings: ApplicationSettings, own_ports: Container[int] = ()
) -> Iterator[Found]:
    """Yield what is missing, each with the path of the setting that requires it."""
    is_running = _port_of(content) in own_ports
    if not is_running:
        yield from check_port(content)
    yield from _check_cpus(settings)
    yield from _check_gpus(settings)
    yield from _check_nodes(settings)
    if not is_running:
        yield from _check_memory(settings)


def _port_of(content: Mapping[str, Any]) -> int | None:
    try:
        return http_address(content)[1]
    except (TypeError, ValueError):
        return None  # check_serve_keys reports it


def check_port(content: Mapping[str, Any]) -> Iterator[Found]:
    """Check that the application's port is free."""
    try:
        host, port = http_address(content)
    except (TypeError, ValueError):
        return  # check_serve_keys reports it
    where = ("http_options", "port")
    try:
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind((host, port))
            probe.listen(1)
    except OverflowError:
        return  # check_serve_keys reports the port
    except (socket.gaierror, TypeError, UnicodeError) as exc:
        yield ("http_options", "host"), f"http_options.host {host!r} is not an address of this machine: {exc}"
    except PermissionError:
        yield where, f"http_options.port {port} needs root privileges: choose a port above 1023"
    except OSError as exc:
        if is_taken(exc):
            yield (
                where,
                (
                    f"http_options.port {port} is in use{listening_process(port)}: stop that program, or "
                    "choose another port, such as with `serve --port`"
                ),
            )
        else:
            yield ("http_options", "host"), f"cannot listen on http_options.host {host!r}: {exc.strerror}"


def is_taken(error: OSError) -> bool:
    """Return whether an address is already in use."""
    return error.errno in {98, 48}  # EADDRINUSE of Linux and of macOS


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


def _check_cpus(settings: ApplicationSettings) -> Iterator[Found]:
    there = os.cpu_count() or 1
    needed = settings.gateways.initial_replicas * settings.gateways.num_cpus
    needed += _CPUS_PER_MODEL * len(settings.models)
    needed += sum(pool.num_cpus * _replicas(pool) for _, pool in _pools(settings))
    if needed > there + 1e-9:
        yield (
            ("applications",),
            (
                f"the deployments reserve {needed:g} CPU cores, but this machine has {there}: lower num_cpus "
                "of pools (resources.num_cpus) or gateways; it reserves cores but enforces no limit"
            ),
        )


def _check_gpus(settings: ApplicationSettings) -> Iterator[Found]:
    needed = sum(pool.gpus_per_replica * _replicas(pool) for _, pool in _pools(settings))
    if not needed:
        return
    there = gpu_names()
    if needed > len(there) + 1e-9:
        first = next(where for where, pool in _pools(settings) if pool.gpus_per_replica)
        yield (
            (*first, "resources", "num_gpus"),
            (
                f"the pools need {needed:g} GPUs, but this machine has {len(there) or 'none'}: use fewer "
                "replicas, fractions of num_gpus, or a cluster (`--address`)"
            ),
        )


def _check_nodes(settings: ApplicationSettings) -> Iterator[Found]:
    for where, pool in _pools(settings):
        bundles = len(pool.resources.placement_bundles)
        if bundles > 1 and pool.resources.placement_strategy == "STRICT_SPREAD":
            yield (
                (*where, "resources", "advanced", "placement_strategy"),
                (
                    f"STRICT_SPREAD needs {bundles} nodes per replica, but this is one machine: use a "
                    "cluster (`--address`)"
                ),
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


def _check_memory(settings: ApplicationSettings) -> Iterator[Found]:
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
        path = (*unlimited, "engine", "vllm", "env")
        yield (
            path,
            (
                'engines without a GPU need env: {VLLM_CPU_KVCACHE_SPACE: "1"} (GiB of KV cache): '
                f"by default vLLM takes most of the {there:.0f} GiB of this machine"
            ),
        )
    if needed > there:
        yield (
            ("applications",),
            (
                f"vLLM engines need about {needed:.0f} GiB of memory, but this machine has {there:.0f}: use "
                "fewer engines, a smaller model or less VLLM_CPU_KVCACHE_SPACE"
            ),
        )


def _kv_gib(engine: VllmEngineSettings) -> float | None:
    value = engine.env.get("VLLM_CPU_KVCACHE_SPACE", os.environ.get("VLLM_CPU_KVCACHE_SPACE"))
    try:
        return None if value is None else float(value)
    except ValueError:
        return None


def _weights_gib(engine: VllmEngineSettings) -> float:
    folder = Path(engine.model)
    stored = sum(each.stat().st_size for each in folder.glob("*.safetensors")) if folder.is_dir() else 0
    # Weights are usually stored with two bytes each.
    return stored * (2 if engine.args.get("dtype") == "float32" else 1) / _GIB


def _pools(settings: ApplicationSettings) -> Iterator[tuple[tuple[Step, ...], PoolSettings]]:
    for number, model in enumerate(settings.models):
        for place, pool in enumerate(model.pools):
            yield ("applications", 0, "args", "models", number, "pools", place), pool


def _replicas(pool: PoolSettings) -> int:
    """Return the number of replicas that must run from the start."""
    if pool.autoscaling is not None:
        return max(pool.autoscaling.min_replicas, 1)
    return pool.replicas or 1
