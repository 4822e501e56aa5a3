"""Command `serve`: checks a configuration and runs its application until it is stopped.

For `serve --endpoints` and `init --servers` it discovers running servers (`discover_servers`), and creates
the configuration in front of them (`configuration`).
"""

import argparse
import asyncio
import contextlib
import math
import os
import shutil
import signal
import textwrap
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import yaml

from serve_app.cli import templates
from serve_app.cli.application import ConnectionFailedError, request
from serve_app.cli.check import print_findings
from serve_app.cli.command import port_number, print_result, program, warn, write_text
from serve_app.cli.serve.instance import environment, instance_folder, register, running_instances, unregister
from serve_app.cli.serve.processes import HostJob
from serve_app.cli.serve.supervisor import Console, LaunchParameters, Supervisor
from serve_app.engines.adapters import PageResponse, identify
from serve_app.errors import EngineError, ServeAppError, SettingsError
from serve_app.serving.access import (
    ADMIN_KEY_VARIABLE,
    is_loopback,
    raise_descriptor_limit,
    write_admin_key,
    write_ray_token,
)
from serve_app.settings.application import DEFAULT_PORT, ApplicationSettings, find_application, http_address
from serve_app.settings.checking import check_file

SHORT_CONTEXT = 8_192
"""Maximum boundary of the short pool. At least four fifths of most traffic fit into it."""


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
        is_observed: whether the scheduler only observes at first.
    """

    found: tuple[Server, ...]
    api_key_env: str | None = None
    is_observed: bool = False


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
    return PageResponse(200 if answer.is_success else answer.status, answer.body)


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


def scalar(text: str) -> str:
    """Format a text, quoted only if YAML needs it."""
    return yaml.safe_dump(text, width=10_000).removesuffix("\n...\n").removesuffix("\n")


def flow(texts: tuple[str, ...]) -> str:
    """Format a list on one line."""
    return yaml.safe_dump(list(texts), default_flow_style=True, width=10_000).strip()


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


def configuration(servers: Servers, place: ListenAddress) -> str:
    """Return the complete file."""
    text = _FRAME.format(
        start=place.start,
        host=scalar(place.host),
        port=place.port,
        models=textwrap.indent(remote_models(servers), " " * 8),
    )
    if is_loopback(place.host):
        return text
    return text + textwrap.indent(_INSECURE if place.insecure else _KEYS, " " * 6)


_FRAME = """\
# In front of running servers, which need no changes.
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

# Wildcard addresses, which clients cannot connect to.
_EVERYWHERE = {"0.0.0.0": "127.0.0.1", "::": "[::1]"}  # noqa: S104 - looked up, not bound

_OF_A_CLONE = Path("configs/local.yaml")

# Set by the container image: the address to listen on with `--endpoints`.
HOST_VARIABLE = "EWSJF_HOST"


def serve(
    config: Path, *, address: str | None = None, port: int | None = None, dashboard: bool = False
) -> int:
    """Serve the application of a configuration until a signal stops it.

    Args:
        address: address of a running Ray cluster.
        port: port to listen on, instead of the configuration's.

    Returns:
        The exit status: 2 for a configuration with mistakes, otherwise as `Supervisor.run`.

    Raises:
        ServeAppError: a secret that the configuration names cannot be read here, or the folder of the
            instance cannot be written.
    """
    console = Console()
    own_ports = [each.port for each in running_instances()]
    checked = check_file(config, on_this_machine=address is None, port=port, own_ports=own_ports)
    print_findings(config, checked)
    if checked.mistakes:
        return 2
    assert checked.settings is not None, "a file without mistakes has settings"
    if address is None:
        # Before Ray starts: the processes that read them inherit this environment.
        checked.settings.check_secrets()
    console.line(f"{config} is valid ({console.elapsed_s:.1f} s)")
    host, listening = http_address(checked.content)
    models, drain_s = tuple(checked.settings.served_names()), checked.settings.gateways.drain_timeout_s
    url, folder = local_url(checked.content), instance_folder(listening)
    try:
        _refresh(folder)
        secrets = {ADMIN_KEY_VARIABLE: write_admin_key(folder)}
        secrets |= write_ray_token(folder) if address is None else {}
        register(url, config, folder, drain_s, models)
    except OSError as exc:
        raise SettingsError(
            f"{folder} cannot be written: {exc.strerror}; choose another folder with TMPDIR"
        ) from exc
    if (previous := _previous(folder)).is_dir():
        console.line(f"logs of the previous run: {previous}")
    raise_descriptor_limit()
    launch = LaunchParameters(
        job=HostJob(
            config=str(config.resolve()),
            folder=str(folder),
            url=url,
            address=address,
            port=port,
            dashboard=dashboard,
            engines=engine_kinds(checked.settings),
        ),
        environment=environment(os.environ) | secrets,
        drain_s=drain_s,
        models=models,
        requires_key=checked.settings.gateway.requires_keys,
        listen_address=f"http://{host}:{listening}",
    )
    try:
        return asyncio.run(Supervisor(launch, console).run())
    finally:
        unregister(folder)


def local_url(content: Mapping[str, Any]) -> str:
    """Return the URL at which programs on this machine reach the application."""
    host, port = http_address(content)
    scheme = "https" if (content.get("http_options") or {}).get("ssl_certfile") else "http"
    prefix = find_application(content)[1].get("route_prefix") or "/"
    return f"{scheme}://{_EVERYWHERE.get(host, host)}:{port}{prefix.rstrip('/')}"


def engine_kinds(settings: ApplicationSettings) -> dict[str, str]:
    """Return the kind of engine by deployment, see `HostJob.engines`."""
    return {
        f"{pool.name}-{model.name}": pool.engine.kind for model in settings.models for pool in model.pools
    }


def _refresh(folder: Path) -> None:
    """Create an empty folder for the files of an instance; those of the previous one are moved beside it.

    Raises:
        SettingsError: the folder belongs to another user, or a running instance uses it.
    """
    folder.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    if folder.parent.stat().st_uid != os.getuid():
        raise SettingsError(f"{folder.parent} belongs to another user: set TMPDIR to your own folder")
    for running in running_instances():
        if running.folder == str(folder):
            raise SettingsError(
                f"process {running.pid} already runs {running.config} on this port: change it with "
                f"`{program()} deploy`, stop it with `{program()} stop`, or choose another port with --port"
            )
    previous = _previous(folder)
    shutil.rmtree(previous, ignore_errors=True)
    with contextlib.suppress(OSError):  # there is none before the first start
        folder.rename(previous)
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(exist_ok=True)


def _previous(folder: Path) -> Path:
    """Return the folder of the run before the one in `folder`."""
    return folder.with_name(f"{folder.name}.last")


def default_config() -> Path:
    """Return the default configuration: that of a clone in the working directory, else the packaged one."""
    return _OF_A_CLONE if _OF_A_CLONE.is_file() else templates.EMULATED


EXAMPLE = "example:\n  ewsjf serve configs/local.yaml"


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the arguments."""
    parser.add_argument(
        "config",
        nargs="?",
        type=Path,
        help="configuration (default: configs/local.yaml, or its installed copy)",
    )
    parser.add_argument(
        "--address",
        help="address of a running Ray cluster, such as auto; `ray start` needs the variables of "
        "serve_app/cli/serve/serve.env in its environment",
    )
    parser.add_argument("--dashboard", action="store_true", help="also start Ray's dashboard")

    parser.add_argument(
        "--endpoints",
        metavar="URL[,URL ...]",
        help="instead of a configuration: run in front of these servers",
    )
    parser.add_argument(
        "--api-key-env", help="with --endpoints: environment variable with the servers' API key"
    )
    parser.add_argument(
        "--observe",
        action="store_true",
        help="with --endpoints: schedule no requests until `ewsjf mode active`",
    )
    parser.add_argument(
        "--port",
        type=port_number,
        help="port to listen on (default: that of the configuration; with --endpoints "
        f"{DEFAULT_PORT}, at 127.0.0.1, or at {HOST_VARIABLE} in a container)",
    )


def run(args: argparse.Namespace) -> int:
    """Run the command and return its exit status."""
    # As the first process of a container, this one would ignore SIGTERM until the supervisor handles it.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    config = args.config or default_config()
    if args.endpoints is not None:
        if args.config is not None:
            raise SettingsError("pass a configuration or --endpoints, not both")
        config = _write_config_for(args)
    elif args.observe:
        raise SettingsError(
            "--observe needs --endpoints: in a configuration, set scheduler.active_share to 0"
        )
    return serve(config, address=args.address, port=args.port, dashboard=args.dashboard)


def _write_config_for(args: argparse.Namespace) -> Path:
    """Write a configuration in front of servers, which are queried for their models."""
    urls = [url for each in args.endpoints.split(",") if (url := each.strip())]
    if not urls:
        raise SettingsError("--endpoints needs at least one URL, such as http://host:8000")
    found = discover_servers(urls, args.api_key_env)
    servers = Servers(found=found, api_key_env=args.api_key_env, is_observed=args.observe)
    for server in found:
        print_result(f"{server.url}: {', '.join(server.models)}")
    port = args.port or DEFAULT_PORT
    folder = instance_folder(port).parent
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    config = folder / f"endpoints-{port}.yaml"
    host, insecure = os.environ.get(HOST_VARIABLE, "127.0.0.1"), KEY_VARIABLE not in os.environ
    if insecure and not is_loopback(host):
        warn(f"clients of {host}:{port} need no API key: set {KEY_VARIABLE} to require one")
    start = f"{program()} serve {config}"
    write_text(
        config, configuration(servers, ListenAddress(host=host, port=port, start=start, insecure=insecure))
    )
    return config
