"""Command `check`: validates configurations before anything starts."""

import argparse
from dataclasses import replace
from pathlib import Path

from serve_app.cli.command import print_result, program, warn
from serve_app.cli.serve.instance import running_instances
from serve_app.engines.model.hardware import find_gpu, gpu_names
from serve_app.settings.application import http_address
from serve_app.settings.checking import CheckResult, check_file


def print_findings(config: Path, found: CheckResult) -> None:
    """Print each mistake and each warning as one line."""
    for mistake in found.mistakes:
        warn(mistake.located(config))
    for warning in found.warnings:
        warn(replace(warning, message=f"warning: {warning.message}").located(config))


EXAMPLE = "example:\n  ewsjf check configs/local.yaml\n  ewsjf check --probe configs/remote.yaml"


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the arguments."""
    parser.add_argument("configs", nargs="+", type=Path, metavar="CONFIG", help="configurations to check")
    parser.add_argument(
        "--skip-machine-checks",
        action="store_true",
        help="skip checks of this machine, such as its ports, cores, GPUs, memory and folders",
    )
    parser.add_argument(
        "--gpu",
        type=_known_gpu,
        help=f"GPU of the engines, to compute their capacity: {', '.join(gpu_names())} (default: this "
        "machine's; a pool's resources.accelerator_type takes precedence)",
    )
    parser.add_argument(
        "--probe",
        action="store_true",
        help="query each remote server that `endpoints` lists by its URL: one that does not answer, rejects "
        "the key or lacks the model is a mistake; needs the variables of api_key_env",
    )


def _known_gpu(name: str) -> str:
    found = find_gpu(name)
    if found is None:
        raise argparse.ArgumentTypeError(f"{name!r} is not a known GPU: use one of {', '.join(gpu_names())}")
    return found


def run(args: argparse.Namespace) -> int:
    """Run the command and return its exit status."""
    status, running = 0, {each.port: each for each in running_instances()}
    for config in args.configs:
        found = check_file(
            config,
            on_this_machine=not args.skip_machine_checks,
            gpu=args.gpu,
            own_ports=running,
            probe=args.probe,
        )
        print_findings(config, found)
        if found.mistakes or found.settings is None:
            status = 2
            continue
        instance = None if args.skip_machine_checks else running.get(http_address(found.content)[1])
        names = set(found.settings.served_names())
        if instance is not None and instance.models and names.isdisjoint(instance.models):
            warn(
                f"{config}: http_options.port {instance.port} is in use by another application "
                f"({instance.config}), which serves {', '.join(instance.models)}: choose another port, or "
                f"stop that one with `{program()} stop --url {instance.url}`"
            )
            status = 2
            continue
        print_result(f"{config} is valid, with warnings" if found.warnings else f"{config} is valid")
        if instance is not None:
            print_result(f"Its application runs: apply changes with `{program()} deploy {config}`.")
    return status
