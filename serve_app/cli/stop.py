"""Command `stop`: stops an application from another terminal or a hook."""

import argparse
import contextlib
import os
import signal
import time

import psutil

from serve_app.cli.command import positive_float, print_result
from serve_app.cli.serve.instance import choose_instance, running_instances
from serve_app.cli.serve.processes import Draining, HostMessage, Stop

_POLL_S = 0.2
_DRAIN_S = 600.0
# Retry-After of rejected requests while a cluster drains, because the successor's start is not known here.
_RETRY_AFTER_S = 30.0


EXAMPLE = "example:\n  ewsjf stop --url http://127.0.0.1:8000"


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the arguments."""
    where = parser.add_mutually_exclusive_group()
    where.add_argument("--url", help="application on this machine to stop, if several run")
    where.add_argument(
        "--address",
        help="Ray cluster, such as auto: drain all its gateways and stop nothing else, for a preStop hook",
    )
    parser.add_argument(
        "--drain-s",
        type=positive_float,
        default=_DRAIN_S,
        help="with --address: time limit for in-flight requests, in seconds (default: %(default)g)",
    )


def run(args: argparse.Namespace) -> int:
    """Run the command and return its exit status."""
    if args.address is not None:
        _drain_cluster(args.address, args.drain_s)
        return 0
    instance = choose_instance(list(running_instances()), args.url)
    print_result(f"stopping {instance.url} ({instance.config}): completing in-flight requests")
    os.kill(instance.pid, signal.SIGTERM)
    while instance.is_running() and not _is_zombie(instance.pid):
        time.sleep(_POLL_S)
    print_result("stopped")
    return 0


def _is_zombie(pid: int) -> bool:
    with contextlib.suppress(psutil.NoSuchProcess):
        return bool(psutil.Process(pid).status() == psutil.STATUS_ZOMBIE)
    return True


def _drain_cluster(address: str, drain_s: float) -> None:
    from serve_app.cli.serve.cluster import drain_cluster  # noqa: PLC0415 - Ray takes seconds to import

    aborted = drain_cluster(address, Stop(drain_s, _RETRY_AFTER_S), _print_progress)
    print_result(f"drained; {aborted} requests were aborted with an error" if aborted else "drained")


def _print_progress(message: HostMessage) -> None:
    if isinstance(message, Draining) and message.open_requests:
        print_result(f"{message.open_requests} requests in flight, {message.remaining_s:.0f} s left")
