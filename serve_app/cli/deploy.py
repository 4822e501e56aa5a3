"""Command `deploy`: applies a changed configuration to a running application, or rolls back."""

import argparse
import asyncio
import logging
import os
import sys
import time
from collections.abc import Mapping, Set
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import psutil
import yaml

from serve_app.cli.check import print_findings
from serve_app.cli.command import positive_float, print_result
from serve_app.cli.serve.command import engine_kinds
from serve_app.cli.serve.instance import (
    Instance,
    choose_instance,
    environment,
    running_instances,
    write_instance,
)
from serve_app.cli.serve.processes import HostJob, Progress
from serve_app.cli.serve.supervisor import Console
from serve_app.errors import ServeAppError, SettingsError
from serve_app.serving.access import ray_token
from serve_app.serving.remote.endpoint import unusable_endpoints
from serve_app.settings.application import find_application, settings_of
from serve_app.settings.checking import CheckResult, check_file

if TYPE_CHECKING:
    from serve_app.cli.serve.changes import Change
    from serve_app.cli.serve.cluster import Cluster

_POLL_S = 0.5
# Default time limits: in place, with processes to start, and with an engine that loads a large model.
_IN_PLACE_TIMEOUT_S, _PROCESS_TIMEOUT_S, _ENGINE_TIMEOUT_S = 30.0, 120.0, 1_800.0
# Variables that belong to a terminal, not to an application.
_OF_A_TERMINAL = frozenset({"PATH", "TERM", "COLUMNS", "LINES", "VIRTUAL_ENV", "PWD", "OLDPWD"})


EXAMPLE = "example:\n  ewsjf deploy configs/local.yaml"


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the arguments."""
    parser.add_argument("config", type=Path, help="the changed configuration")
    where = parser.add_mutually_exclusive_group()
    where.add_argument("--url", help="application on this machine to change, if several run")
    where.add_argument("--address", help="Ray cluster that runs the application, such as auto")
    parser.add_argument(
        "--replace", action="store_true", help="allow a configuration with none of the models that run"
    )
    parser.add_argument(
        "--timeout-s",
        type=positive_float,
        help="roll back if the change is not complete after these seconds (default: "
        f"{_IN_PLACE_TIMEOUT_S:g}; {_PROCESS_TIMEOUT_S:g} and the drain timeout of what stops if processes "
        f"start or stop; {_ENGINE_TIMEOUT_S:g} if an engine of vLLM starts)",
    )


def run(args: argparse.Namespace) -> int:
    """Run the command and return its exit status."""
    config: Path = args.config
    if args.address is not None:
        instance = None
    else:
        instance = _instance(config, args.url)
        _enter(instance)
    checked = _check(config, instance)
    print_findings(config, checked)
    if checked.mistakes:
        return 2
    assert checked.settings is not None, "a file without mistakes has settings"
    os.environ.update(environment(os.environ))
    return _Deployment(config, checked, instance, args.address, args.timeout_s).run(replaces=args.replace)


def _instance(config: Path, url: str | None) -> Instance:
    """Return the application to change: of several, the one that this file started."""
    running = list(running_instances())
    if url is None and len(running) > 1:
        running = [each for each in running if each.config == str(config.resolve())] or running
    chosen = choose_instance(running, url)
    if not chosen.ray_address:
        raise ServeAppError(f"{chosen.url} is not ready yet: wait until it is")
    return chosen


def _enter(instance: Instance) -> None:
    """Take the application's environment, in which its processes find keys and which Ray authenticates."""
    try:
        theirs = psutil.Process(instance.pid).environ()
    except psutil.Error as exc:
        raise ServeAppError(f"process {instance.pid} of {instance.url} cannot be inspected: {exc}") from exc
    for name in os.environ.keys() - theirs.keys() - _OF_A_TERMINAL:
        del os.environ[name]
    os.environ.update({name: value for name, value in theirs.items() if name not in _OF_A_TERMINAL})
    # A Ray that `serve` starts requires its token, and clients do not send one by default.
    os.environ.setdefault("RAY_AUTH_MODE", "token")
    os.environ.update(ray_token(Path(instance.folder)))


def _is_local(instance: Instance | None) -> bool:
    """Return whether an application runs on this machine, as opposed to a cluster that `serve` uses."""
    return instance is not None and (Path(instance.folder) / "ray").is_dir()


def _check(config: Path, instance: Instance | None) -> CheckResult:
    if instance is None:
        return check_file(config, on_this_machine=False)
    return check_file(
        config, on_this_machine=_is_local(instance), port=instance.port, own_ports={instance.port}
    )


class _Deployment:
    """One change of an application, from the comparison to its end."""

    def __init__(
        self,
        config: Path,
        checked: CheckResult,
        instance: Instance | None,
        address: str | None,
        timeout_s: float | None,
    ) -> None:
        assert checked.settings is not None, "see `run`"
        self._config = config
        self._instance = instance
        self._address = instance.ray_address if instance else address or ""
        self._timeout_s = timeout_s
        self._settings = checked.settings
        self._console = Console()
        self._unchanged: set[str] = set()
        self._job = HostJob(
            config=str(config.resolve()),
            folder=instance.folder if instance else "",
            url=instance.url if instance else "",
            # The gateways of a cluster may not be reachable from here.
            address=None if _is_local(instance) else self._address,
            engines=engine_kinds(checked.settings),
        )

    def run(self, *, replaces: bool) -> int:
        """Compare, deploy, wait, and restore the old configuration if that fails.

        Args:
            replaces: whether all running models may stop.

        Returns:
            The exit status: 1 if the change failed.

        Raises:
            ServeAppError: there is no application to change, or all its models would stop.
        """
        # Imported here, because Ray takes two seconds to import, with the environment as it is now.
        from serve_app.cli.serve.changes import IN_PLACE, change  # noqa: PLC0415
        from serve_app.cli.serve.cluster import Cluster, build  # noqa: PLC0415

        logging.getLogger("ray.serve").setLevel(logging.WARNING)
        # A module of the user may extend the application.
        sys.path.insert(0, str(Path.cwd()))
        cluster = Cluster(self._job, yaml.safe_load(self._config.read_text(encoding="utf-8")))
        application = build(cluster.content)
        cluster.connect_to(self._address)
        before = cluster.deployed()
        if before is None:
            print_result("The deployed configuration is unknown, so this cannot be rolled back.")
        else:
            if not replaces:
                self._check_models(before)
            found = change(before, build(before), cluster.content, application)
            self._print_change(found)
            processes = {name for name, effect in found.effects.items() if effect not in IN_PLACE}
            self._timeout_s = self._timeout_s or self._default_timeout_s(processes)
        self._check_endpoints()
        try:
            cluster.deploy(application)
            self._wait(cluster)
            self._check_gateways(cluster)
        except (Exception, KeyboardInterrupt) as exc:  # noqa: BLE001 - Ray raises various errors
            self._console.end()
            reason = "interrupted" if isinstance(exc, KeyboardInterrupt) else str(exc) or repr(exc)
            self._console.line(f"The change failed: {reason}", "red")
            if before is None:
                return 1
            self._console.line("Restoring the previous configuration; Ctrl-C leaves it as it is now.")
            old = Cluster(self._job, before)
            old.deploy(build(before))
            self._wait(old)
            self._console.line(f"Restored after {self._console.elapsed_s:.0f} s.")
            return 1
        cluster.record()
        self._register()
        self._console.line(f"Applied after {self._console.elapsed_s:.0f} s.", "bold green")
        return 0

    def _check_models(self, before: Mapping[str, Any]) -> None:
        """Raise if no running model is in the new configuration, which is probably another application's."""
        running = list(settings_of(find_application(before)[1].get("args", {})).served_names())
        wanted = list(self._settings.served_names())
        if not set(running) & set(wanted):
            raise SettingsError(
                f"{self._config} has none of the models that run at {self._job.url or self._address} "
                f"({', '.join(running)}): pass --replace to stop them and serve {', '.join(wanted)} instead"
            )

    def _print_change(self, change: "Change") -> None:
        print_result("changed settings: " + (", ".join(change.settings) or "none"))
        self._unchanged = {name for name, effect in change.effects.items() if not effect}
        affected = {name: effect for name, effect in change.effects.items() if effect}
        for name, effect in affected.items():
            print_result(f"  {name:<{max(map(len, affected))}}  {effect}")
        if self._unchanged:
            print_result(f"unchanged: {', '.join(sorted(self._unchanged))}")
        if change.after_restart:
            print_result(f"only when it starts again: {', '.join(change.after_restart)}")

    def _default_timeout_s(self, processes: Set[str]) -> float:
        """Return the time limit of a change.

        Args:
            processes: deployments of which processes start or stop.
        """
        if not processes:
            return _IN_PLACE_TIMEOUT_S
        kinds = engine_kinds(self._settings)
        if any(kinds.get(name) == "vllm" for name in processes):
            return _ENGINE_TIMEOUT_S
        drains_s = {
            f"{pool.name}-{model.name}": pool.drain_timeout_s
            for model in self._settings.models
            for pool in model.pools
        }
        # Of these, no process waits for requests.
        quick = {name for name in processes if name.startswith(("scheduler-", "tuner-"))}
        quick |= {name for name in processes if kinds.get(name) == "remote"}
        usual_s = self._settings.gateways.drain_timeout_s
        return _PROCESS_TIMEOUT_S + max(
            (drains_s.get(name, usual_s) for name in processes - quick), default=0.0
        )

    def _check_endpoints(self) -> None:
        """Query the remote servers of changed pools before anything changes.

        From here, those of a cluster may not be reachable, so failures are only warnings then.

        Raises:
            ServeAppError: a pool would have no server that can be used.
        """
        for model in self._settings.models:
            for pool in model.pools:
                remote = pool.engine.remote
                if remote is None or f"{pool.name}-{model.name}" in self._unchanged:
                    continue
                failures = asyncio.run(unusable_endpoints(remote))
                if self._job.address is None and failures and len(failures) == len(remote.endpoints):
                    raise ServeAppError(
                        f"nothing was changed, because no endpoint of pool {pool.name} of model {model.name} "
                        f"can be used: {'; '.join(failures.values())}"
                    )
                for reason in failures.values():
                    self._console.line(f"warning: {reason}; it receives requests once it can be used")

    def _wait(self, cluster: "Cluster") -> None:
        """Wait until all processes have changed.

        Raises:
            ServeAppError: one cannot, or it takes too long.
        """
        timeout_s = self._timeout_s or _ENGINE_TIMEOUT_S
        deadline = time.monotonic() + timeout_s
        self._console.step("change")
        while True:
            progress = cluster.progress()
            ready = [name for name in progress.ready if name not in self._unchanged]
            self._console.progress(Progress(ready, progress.lines))
            if not progress.lines and cluster.models_without_server() is not None:
                break
            if time.monotonic() > deadline:
                raise ServeAppError(
                    f"not complete after {timeout_s:g} s: {', '.join(progress.lines) or 'not ready'}"
                )
            time.sleep(_POLL_S)
        self._console.end_step()

    def _check_gateways(self, cluster: "Cluster") -> None:
        """Check that the gateways apply the settings.

        Those that reject them serve with the previous ones, but a gateway that starts later would fail.

        Raises:
            ServeAppError: one has rejected them.
        """
        try:
            reasons = cluster.rejected_settings()
        except Exception as exc:  # noqa: BLE001 - gateways of a previous release cannot report it
            self._console.line(f"warning: gateways do not report whether they reject a setting: {exc}")
            return
        if reasons:
            raise ServeAppError(f"gateways rejected the settings: {'; '.join(reasons)}")

    def _register(self) -> None:
        if self._instance is not None:
            write_instance(
                msgspec.structs.replace(
                    self._instance,
                    config=self._job.config,
                    drain_s=self._settings.gateways.drain_timeout_s,
                    models=tuple(self._settings.served_names()),
                )
            )
