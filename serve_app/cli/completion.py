"""Command `completion`: prints a shell script, which calls the program for completions."""

import argparse

from argcomplete.shell_integration import shellcode

from serve_app.cli.command import Command, print_result

_EXECUTABLE = "ewsjf"


def _configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("shell", choices=("bash", "zsh", "fish"), help="shell that reads the script")


def _run(args: argparse.Namespace) -> int:
    print_result(shellcode([_EXECUTABLE], shell=args.shell))
    return 0


COMMAND = Command(
    example=(
        "example:\n"
        "  ewsjf completion bash\n"
        "\n"
        'in ~/.bashrc: eval "$(ewsjf completion bash)"; in ~/.zshrc: eval "$(ewsjf completion zsh)"; '
        "in fish: ewsjf completion fish | source"
    ),
    configure=_configure,
    run=_run,
)
