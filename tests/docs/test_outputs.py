"""Outputs of commands in documents and `--help`: only in ignored folders or outside the checkout."""

import re
import shlex
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from serve_app import cli
from tests.docs import documents, shell
from tests.docs.documents import ROOT, code_blocks

_OUTPUTS = ("json", "html", "records", "log", "out", "save_partition")
_OWN = re.compile(r"\s*(?:\.venv/bin/)?ewsjf (.*)", re.DOTALL)


def shown_commands() -> Iterator[tuple[str, str]]:
    """Yield the place of every shown command of ours, and its arguments."""
    for document in documents.documents():
        for block in code_blocks(document):
            if block.language == "console":
                for command in shell.commands(block.text):
                    yield block.place, command
    for own in cli.COMMANDS:
        for command in own.load().example.replace("\\\n", " ").splitlines():
            yield f"{own.name} --help", command


SHOWN = [
    (place, own[1])
    for place, command in shown_commands()
    if (own := _OWN.match(command.replace("\\\n", " ")))
]


def written_by(arguments: list[str]) -> list[Path]:
    redirected = []
    if ">" in arguments:
        place = arguments.index(">")
        arguments, redirected = arguments[:place], [Path(arguments[place + 1])]
    parsed = vars(shell.parse_own(arguments))
    given = [*(parsed.get(name) for name in _OUTPUTS), *redirected]
    return [path for path in given if isinstance(path, Path) and not path.is_absolute()]


@pytest.mark.parametrize(("place", "command"), SHOWN, ids=[place for place, _ in SHOWN])
def test_its_outputs_are_ignored_by_git(place: str, command: str) -> None:
    arguments = shlex.split(command, comments=True)
    for path in written_by(arguments):
        # A path below the folder, because a pattern such as `out/` matches only folders.
        ignored = subprocess.run(
            ["git", "-C", str(ROOT), "check-ignore", "-q", str(path / "file")], check=False
        )
        assert ignored.returncode == 0, f"{place}: {path} would show up in `git status`: write to out/"


def test_outputs_are_found() -> None:
    assert sum(bool(written_by(shlex.split(command, comments=True))) for _, command in SHOWN) >= 5
