"""Command `serve`: checks a configuration and runs its application until it is stopped."""

import argparse
import asyncio
import contextlib
import os
import shutil
import signal
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from serve_app.cli import templates
from serve_app.cli.check import print_findings
from serve_app.cli.command import Command, port_number, print_result, program, warn, write_text
from serve_app.cli.serve.environment import environment, instance_folder
from serve_app.cli.serve.instance import register, running_instances, unregister
from serve_app.cli.serve.messages import HostJob
from serve_app.cli.serve.servers import (
    KEY_VARIABLE,
    ListenAddress,
    Servers,
    configuration,
    discover_servers,
)
from serve_app.cli.serve.supervisor import LaunchParameters, Supervisor
from serve_app.cli.serve.terminal import Console
from serve_app.errors import SettingsError
from serve_app.serving.access import (
    ADMIN_KEY_VARIABLE,
    is_loopback,
    raise_descriptor_limit,
    write_admin_key,
    write_ray_token,
)
from serve_app.settings.address import DEFAULT_PORT, http_address
from serve_app.settings.application import ApplicationSettings
from serve_app.settings.checking import check_file

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
    prefix = content["applications"][0].get("route_prefix") or "/"
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


def _configure(parser: argparse.ArgumentParser) -> None:
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


def _run(args: argparse.Namespace) -> int:
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


COMMAND = Command(
    example="example:\n  ewsjf serve configs/local.yaml",
    configure=_configure,
    run=_run,
)
