"""Command `init`: writes a first configuration that passes `check`."""

import argparse
import tempfile
from pathlib import Path

from serve_app.cli.check import print_findings
from serve_app.cli.command import (
    Command,
    add_whole,
    port_number,
    positive_int,
    print_result,
    program,
    warn,
    writing,
)
from serve_app.cli.init.document import (
    Emulated,
    Fleet,
    Gpus,
    ListenAddress,
    Servers,
    configuration,
    discover_servers,
)
from serve_app.engines.vllm.library import is_installed
from serve_app.errors import ServeAppError, SettingsError
from serve_app.settings.address import DEFAULT_PORT
from serve_app.settings.checking import CheckResult, check_file
from serve_app.settings.checking.machine import gpu_names, single_gpu_name

_PATH = Path("ewsjf.yaml")


def _configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "path", nargs="?", type=Path, default=_PATH, help="file to write (default: %(default)s)"
    )
    parser.add_argument("--force", action="store_true", help="overwrite the file")
    what = parser.add_mutually_exclusive_group()
    what.add_argument(
        "--emulated", action="store_true", help="emulated engines, without GPU and model (the default)"
    )
    what.add_argument(
        "--gpus",
        nargs="?",
        type=positive_int,
        const=0,
        metavar="N",
        help="vLLM on N GPUs (default: all that nvidia-smi lists)",
    )
    what.add_argument(
        "--servers", nargs="+", metavar="URL", help="run in front of these vLLM servers; put PATH before this"
    )
    parser.add_argument("--model", help="with --gpus: name on the model hub, or folder")
    add_whole(
        parser,
        "--max-model-len",
        "with --gpus: context limit in tokens (default: that of the model, or 32768)",
    )
    add_whole(parser, "--gpus-per-engine", "with --gpus: GPUs per engine, for tensor parallelism", 1)
    parser.add_argument("--api-key-env", help="with --servers: environment variable with their API key")
    add_whole(parser, "--max-num-seqs", "with --servers: max_num_seqs that they were started with")
    parser.add_argument(
        "--host",
        default="127.0.0.1",
        help="address to listen on; clients need keys if it is not a loopback address (default: %(default)s)",
    )
    parser.add_argument(
        "--insecure",
        action="store_true",
        help="require no keys, because a proxy in front authenticates clients",
    )
    parser.add_argument(
        "--port", type=port_number, default=DEFAULT_PORT, help="port to listen on (default: %(default)s)"
    )


def _run(args: argparse.Namespace) -> int:
    path: Path = args.path
    if path.is_dir():
        raise SettingsError(f"{path} is a directory: choose a file in it")
    if path.exists() and not args.force:
        raise SettingsError(f"{path} exists: choose another file, or overwrite it with --force")
    fleet = _fleet_of(args)
    start = f"{program()} serve {path}"
    address = ListenAddress(host=args.host, port=args.port, start=start, insecure=args.insecure)
    text = configuration(fleet, address)
    with tempfile.TemporaryDirectory() as folder, writing(path) as draft:
        # What is written directly, such as /dev/stdout, is checked before.
        checked = Path(folder) / _PATH if draft.resolve() == path.resolve() else draft
        checked.write_text(text, encoding="utf-8")
        found = _checked(checked, path)
        if checked != draft:
            draft.write_text(text, encoding="utf-8")
    _report(fleet, path, found)
    return 0


def _fleet_of(args: argparse.Namespace) -> Fleet:
    """Return the fleet that the options describe."""
    if args.servers is not None:
        found = discover_servers(args.servers, args.api_key_env)
        return Servers(found=found, api_key_env=args.api_key_env, max_num_seqs=args.max_num_seqs)
    if args.gpus is None and args.model is None:
        return Emulated()
    if args.model is None:
        raise SettingsError("--gpus needs --model: name on the model hub, or folder")
    count = args.gpus or len(gpu_names())
    if not count:
        raise SettingsError("nvidia-smi lists no GPU here: pass the number of GPUs with --gpus N")
    return Gpus(
        count=count,
        model=args.model,
        max_model_len=args.max_model_len,
        per_engine=args.gpus_per_engine,
        gpu=single_gpu_name(),
    )


def _checked(draft: Path, path: Path) -> CheckResult:
    """Check the draft of a configuration, including this machine and the capacity of its engines.

    Raises:
        ServeAppError: it has mistakes that are independent of the machine.
    """
    if mistakes := check_file(draft, on_this_machine=False).mistakes:
        raise ServeAppError("; ".join(mistake.located(path) for mistake in mistakes))
    return check_file(draft)


def _report(fleet: Fleet, path: Path, found: CheckResult) -> None:
    missing_here = found.mistakes
    print_result(
        f"{path} is written and passes `check`"
        + (", except for requirements that this machine does not meet" if missing_here else "")
    )
    print_findings(path, found)
    if isinstance(fleet, Gpus) and not is_installed():
        warn("vLLM is not installed here: install this package with the extra `vllm` where the engines run")
    if missing_here:
        print_result(f"next, once they are met: {program()} serve {path}")
    else:
        print_result(f"next: {program()} serve {path}")


COMMAND = Command(
    example="example:\n  ewsjf init out/ewsjf.yaml --emulated",
    configure=_configure,
    run=_run,
)
