"""Command `init`: writes a first configuration, as a template with comments."""

import argparse
import re
import tempfile
from pathlib import Path

from serve_app.cli import templates
from serve_app.cli.check import print_findings
from serve_app.cli.command import print_result, program, warn, writing
from serve_app.cli.serve.command import ListenAddress, Servers, configuration, discover_servers
from serve_app.engines.vllm.library import is_installed
from serve_app.errors import ServeAppError, SettingsError
from serve_app.settings.application import DEFAULT_PORT
from serve_app.settings.checking import CheckResult, check_file

_PATH = Path("ewsjf.yaml")
_START = re.compile("^#   scripts/serve.*", re.MULTILINE)


EXAMPLE = "example:\n  ewsjf init out/ewsjf.yaml --emulated"


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the arguments."""
    parser.add_argument(
        "path", nargs="?", type=Path, default=_PATH, help="file to write (default: %(default)s)"
    )
    parser.add_argument("--force", action="store_true", help="overwrite the file")
    what = parser.add_mutually_exclusive_group()
    what.add_argument(
        "--emulated", action="store_true", help="emulated engines, without GPU and model (the default)"
    )
    what.add_argument(
        "--gpus", action="store_true", help="vLLM on a GPU, with a model and limits to replace by yours"
    )
    what.add_argument(
        "--servers", nargs="+", metavar="URL", help="run in front of these vLLM servers; put PATH before this"
    )
    parser.add_argument("--api-key-env", help="with --servers: environment variable with their API key")


def run(args: argparse.Namespace) -> int:
    """Run the command and return its exit status."""
    path: Path = args.path
    if path.is_dir():
        raise SettingsError(f"{path} is a directory: choose a file in it")
    if path.exists() and not args.force:
        raise SettingsError(f"{path} exists: choose another file, or overwrite it with --force")
    text = _text_of(args)
    with tempfile.TemporaryDirectory() as folder, writing(path) as draft:
        # What is written directly, such as /dev/stdout, is checked before.
        checked = Path(folder) / _PATH if draft.resolve() == path.resolve() else draft
        checked.write_text(text, encoding="utf-8")
        found = _checked(checked, path)
        if checked != draft:
            draft.write_text(text, encoding="utf-8")
    _report(path, found, is_example=args.gpus)
    return 0


def _text_of(args: argparse.Namespace) -> str:
    """Return the configuration that the options describe."""
    start = f"{program()} serve {args.path}"
    if args.servers is not None:
        found = discover_servers(args.servers, args.api_key_env)
        address = ListenAddress(host="127.0.0.1", port=DEFAULT_PORT, start=start)
        return configuration(Servers(found=found, api_key_env=args.api_key_env), address)
    template = templates.GPUS if args.gpus else templates.EMULATED
    return _START.sub(lambda _: f"#   {start}", template.read_text(encoding="utf-8"), count=1)


def _checked(draft: Path, path: Path) -> CheckResult:
    """Check the draft of a configuration, including this machine and the capacity of its engines.

    Raises:
        ServeAppError: it has mistakes that are independent of the machine.
    """
    if mistakes := check_file(draft, on_this_machine=False).mistakes:
        raise ServeAppError("; ".join(mistake.located(path) for mistake in mistakes))
    return check_file(draft)


def _report(path: Path, found: CheckResult, *, is_example: bool) -> None:
    print_result(
        f"{path} is written and passes `check`"
        + (", except for requirements that this machine does not meet" if found.mistakes else "")
    )
    print_findings(path, found)
    if is_example:
        if not is_installed():
            warn("vLLM is not installed here: install this package with the extra `vllm` where engines run")
        print_result(f"next: fill in your model and its limits, then {program()} check {path}")
    else:
        when = "next, once they are met" if found.mistakes else "next"
        print_result(f"{when}: {program()} serve {path}")
