"""Command `completion`: prints a shell script, which calls the program for completions."""

import argparse

from argcomplete.shell_integration import shellcode

from serve_app.cli.command import print_result

_EXECUTABLE = "ewsjf"


EXAMPLE = (
    "example:\n"
    "  ewsjf completion bash\n"
    "\n"
    'in ~/.bashrc: eval "$(ewsjf completion bash)"; in ~/.zshrc: eval "$(ewsjf completion zsh)"; '
    "in fish: ewsjf completion fish | source"
)


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the arguments."""
    parser.add_argument("shell", choices=("bash", "zsh", "fish"), help="shell that reads the script")


def run(args: argparse.Namespace) -> int:
    """Run the command and return its exit status."""
    print_result(shellcode([_EXECUTABLE], shell=args.shell))
    return 0
