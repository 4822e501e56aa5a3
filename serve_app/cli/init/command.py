"""Command `init`: writes a first configuration that passes `check`."""

import argparse
import shlex
import sys
import tempfile
from pathlib import Path

from rich.console import Console
from rich.prompt import IntPrompt, Prompt

from serve_app.cli.check import print_findings
from serve_app.cli.command import Command, add_whole, positive_int, print_result, program, warn
from serve_app.cli.init.document import (
    DEFAULT_CONTEXT,
    Emulated,
    Fleet,
    Gpus,
    ListenAddress,
    Servers,
    config_context_limit,
    configuration,
    discover_servers,
)
from serve_app.engines.vllm.library import is_installed
from serve_app.errors import ServeAppError, SettingsError
from serve_app.settings.checking import CheckResult, check_file
from serve_app.settings.checking.machine import gpu_names, single_gpu_name

# -- prompts -----------------------------------------------------------------------------------------------


def prompt_fleet(console: Console) -> Fleet:
    """Prompt for the engines that serve requests.

    Raises:
        ServeAppError: a server does not answer, or the answers contradict each other.
    """
    found = gpu_names()
    console.print(f"GPUs on this machine: {', '.join(found) or 'none'}")
    kind = Prompt.ask(
        "Which engines serve requests? (emulated: no GPU or model needed, to try it out; gpus: vLLM on GPUs "
        "of this machine; servers: running vLLM servers)",
        choices=["emulated", "gpus", "servers"],
        default="gpus" if found else "emulated",
        console=console,
    )
    if kind == "gpus":
        return _gpus(console, len(found))
    if kind == "servers":
        return _servers(console)
    return Emulated()


def prompt_port(console: Console, default: int) -> int:
    """Prompt for the port to listen on."""
    return IntPrompt.ask("Port to listen on", default=default, console=console)


def _gpus(console: Console, found: int) -> Gpus:
    count = IntPrompt.ask("Number of GPUs to use", default=found or 1, console=console)
    model = ""
    while not model:
        model = Prompt.ask("Model (name on the model hub, or folder)", default="", console=console)
    per_engine = IntPrompt.ask("GPUs per engine (tensor parallelism)", default=1, console=console)
    context = IntPrompt.ask(
        "Context limit in tokens", default=config_context_limit(model) or DEFAULT_CONTEXT, console=console
    )
    return Gpus(count=count, model=model, max_model_len=context, per_engine=per_engine, gpu=single_gpu_name())


def _servers(console: Console) -> Servers:
    urls: list[str] = []
    while not urls:
        urls = shlex.split(
            Prompt.ask("URLs of the servers, separated by spaces", default="", console=console)
        )
    env = (
        Prompt.ask("Environment variable with their API key (empty: none)", default="", console=console)
        or None
    )
    found = discover_servers(urls, env)
    return Servers(found=found, api_key_env=env)


# -- command -----------------------------------------------------------------------------------------------


_PATH = Path("ewsjf.yaml")
_PORT = 8000
_LAST_PORT = 65_535


def _configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "path", nargs="?", type=Path, default=_PATH, help="file to write (default: %(default)s)"
    )
    parser.add_argument("--force", action="store_true", help="overwrite the file")
    what = parser.add_mutually_exclusive_group()
    what.add_argument(
        "--emulated", action="store_true", help="emulated engines, which need no GPU and no model"
    )
    what.add_argument(
        "--gpus",
        nargs="?",
        type=positive_int,
        const=0,
        metavar="N",
        help="vLLM on N GPUs (default: all that nvidia-smi lists)",
    )
    what.add_argument("--servers", nargs="+", metavar="URL", help="run in front of these vLLM servers")
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
    add_whole(parser, "--port", f"port to listen on (default: {_PORT})")


def _run(args: argparse.Namespace) -> int:
    path: Path = args.path
    if path.exists() and not args.force:
        raise SettingsError(f"{path} exists: choose another file, or overwrite it with --force")
    port = args.port or _PORT
    fleet = _fleet_from_options(args)
    if fleet is None:
        if not sys.stdin.isatty():
            raise SettingsError(
                "choose the engines: --emulated, --gpus [N] --model NAME, or --servers URL ..."
            )
        console = Console(highlight=False, markup=False)
        fleet = prompt_fleet(console)
        port = args.port or prompt_port(console, _PORT)
    if port > _LAST_PORT:
        raise SettingsError(f"--port must be at most {_LAST_PORT}, got {port}")
    start = f"{program()} serve {path}"
    text = configuration(fleet, ListenAddress(host=args.host, port=port, start=start, insecure=args.insecure))
    found = _checked(text, path)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
    _report(fleet, path, found)
    return 0


def _fleet_from_options(args: argparse.Namespace) -> Fleet | None:
    """Return the fleet that the options describe, or None without such options."""
    if args.servers is not None:
        found = discover_servers(args.servers, args.api_key_env)
        return Servers(found=found, api_key_env=args.api_key_env, max_num_seqs=args.max_num_seqs)
    if args.emulated:
        return Emulated()
    if args.gpus is None and args.model is None:
        return None
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


def _checked(text: str, path: Path) -> CheckResult:
    """Check a configuration, including this machine and the capacity of its engines.

    Raises:
        ServeAppError: it has mistakes that are independent of the machine.
    """
    with tempfile.TemporaryDirectory() as folder:
        draft = Path(folder) / path.name
        draft.write_text(text, encoding="utf-8")
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
