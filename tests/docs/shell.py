"""Shell lines in documents: checked against the arguments of each program, without running it."""

import argparse
import contextlib
import functools
import io
import itertools
import re
import shlex
import tomllib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import click

from serve_app import cli
from serve_app.cli.command import CommandParser
from tests.docs.documents import ROOT
from tests.docs.marks import BlockError

PROMPT = "$ "
LOCAL_URL = "http://127.0.0.1:8000"
"""Address of the `scripts/serve` application in documents."""

_SEPARATORS = {"|", "||", "&&", ";", "&"}
_REDIRECTIONS = {">", ">>", "<", "2>", "2>>"}
_ASSIGNMENT = re.compile(r"\w+=")
# Folders with files that documents name; outputs of commands are elsewhere.
_FOLDERS = ("configs", "docs", "experiments", "scripts", "serve_app", "tests")
# System programs that are harmless and whose arguments are not checked.
_COMMON = frozenset(
    {"cat", "cd", "cp", "echo", "export", "grep", "head", "jq", "ls", "mkdir", "source", "tail"}
)
_TOOLS = frozenset({"docker", "git", "pip", "uv"})


def commands(text: str) -> list[str]:
    """Return the commands of a console block, continuation lines joined; lines without a prompt are output.

    Raises:
        BlockError: it has no command.
    """
    found: list[str] = []
    goes_on = False
    for line in text.splitlines():
        if goes_on:
            found[-1] += f"\n{line}"
        elif line.startswith(PROMPT):
            found.append(line.removeprefix(PROMPT))
        else:
            continue
        goes_on = line.endswith("\\")
    if not found:
        raise BlockError("a console block needs a line that begins with `$ `; is it `text`?")
    return found


def check_command(command: str, *, anything_goes: bool) -> None:
    """Check the arguments of each program of a command.

    Raises:
        BlockError: a program is unknown and `anything_goes` is not set, its arguments are wrong, or a file is
            missing.
    """
    for words in _programs(command):
        _check_files(words)
        rule = _rule(words)
        if rule is not None:
            rule(words)
        elif not anything_goes:
            raise BlockError(
                f"no rule for {words[0]}: add one to tests/docs/shell.py, or a mark such as "
                "`<!-- test: parse, REASON -->` before the block"
            )


def is_request(text: str) -> bool:
    """Return whether a console block only sends requests, so that it can be executed.

    Raises:
        BlockError: it mixes requests with other commands, so that it cannot.
    """
    programs = {words[0] for command in commands(text) for words in _programs(command)}
    if "curl" in programs and not programs <= _COMMON | {"curl"}:
        raise BlockError("requests need a block of their own, or a mark: the tests carry them out")
    return "curl" in programs


def _programs(command: str) -> Iterator[list[str]]:
    lexer = shlex.shlex(command.replace("\\\n", " "), posix=True, punctuation_chars=True)
    lexer.whitespace_split = True
    try:
        words = list(lexer)
    except ValueError as exc:
        raise BlockError(f"{command!r} is no shell command: {exc}") from exc
    program: list[str] = []
    for word in [*words, ";"]:
        if word not in _SEPARATORS:
            program.append(word)
        elif program:
            yield _without_surroundings(program)
            program = []


def _without_surroundings(words: list[str]) -> list[str]:
    """Remove assignments before the program, and redirections."""
    while len(words) > 1 and _ASSIGNMENT.match(words[0]):
        words = words[1:]
    kept: list[str] = []
    for before, word in zip(["", *words], words, strict=False):
        if word not in _REDIRECTIONS and before not in _REDIRECTIONS:
            kept.append(word)
    return kept


def _check_files(words: list[str]) -> None:
    for word in words:
        name = word.rpartition("=")[2].partition("::")[0]
        folder = name.partition("/")[0]
        if folder in _FOLDERS and folder != name and not any(ROOT.glob(name.rstrip("/"))):
            raise BlockError(f"{name} does not exist")


Rule = Callable[[list[str]], object]


def _rule(words: list[str]) -> Rule | None:
    if words[0] in _COMMON | _TOOLS:
        return lambda _: None
    name = words[0].removeprefix("./").removeprefix(".venv/bin/")
    if name.startswith(("scripts/", "experiments/")):
        return _check_script
    return _RULES.get(name)


def _check_own(words: list[str]) -> None:
    """Parse the arguments with the real parser, which exits with a message if they are wrong."""
    message = io.StringIO()
    try:
        with contextlib.redirect_stderr(message), contextlib.redirect_stdout(io.StringIO()):
            parse_own(words[1:])
    except SystemExit as exc:
        if exc.code:
            raise BlockError(message.getvalue().strip().splitlines()[-1]) from exc


def parse_own(arguments: list[str]) -> argparse.Namespace:
    """Parse the arguments of `ewsjf` as it does; exits with a message if they are wrong."""
    parser = CommandParser(prog="ewsjf")
    parser.add_argument("--version", action="version", version="")
    commands = parser.add_subparsers(required=True)
    for entry in cli.COMMANDS:
        own = commands.add_parser(entry.name)
        if entry.name in arguments[:1]:
            entry.load().configure(own)
    return parser.parse_args(arguments)


def _check_script(words: list[str]) -> None:
    path = ROOT / words[0]
    if not path.is_file() or not path.stat().st_mode & 0o100:
        raise BlockError(f"{words[0]} is no program")
    if path.name == "test":
        return _check_pytest(words)
    if path.name == "serve":
        return _check_own(["ewsjf", "serve", *(words[1:] or ["configs/local.yaml"])])
    return _check_options(path, words[1:])


def _check_options(path: Path, arguments: list[str]) -> None:
    """Check that options and sub-commands occur in the source of the program or of its module."""
    source = path.read_text(encoding="utf-8")
    for module in re.findall(r"python\S* -m ((?:serve_app|experiments)(?:\.\w+)+)", source):
        source += (ROOT / f"{module.replace('.', '/')}.py").read_text(encoding="utf-8")
    is_shell = path.suffix != ".py" and "bash" in source.splitlines()[0]
    for word in arguments:
        name = word.partition("=")[0]
        is_checked = name.startswith("-") or (is_shell and word.isalpha())
        # `experiments/run` takes the names of folders beside it.
        if is_checked and name not in source and not (path.parent / name).is_dir():
            raise BlockError(f"{path.relative_to(ROOT)} knows no {name}")


def _check_pytest(words: list[str]) -> None:
    markers = {line.partition(":")[0] for line in _project()["tool"]["pytest"]["ini_options"]["markers"]}
    for option, value in itertools.pairwise(words):
        if option == "-m" and not set(re.findall(r"\w+", value)) <= markers | {"and", "or", "not"}:
            raise BlockError(f"no such marker of tests: {value}")


@functools.cache
def _project() -> Mapping[str, dict[str, dict[str, dict[str, list[str]]]]]:
    return tomllib.loads((ROOT / "pyproject.toml").read_text())


def _check_ray(words: list[str]) -> None:
    """Parse the arguments of `ray` with its own parser."""
    from ray.scripts.scripts import cli as program  # takes seconds, for few blocks

    command = program.commands.get(words[1]) if len(words) > 1 else None
    if command is None:
        raise BlockError(f"there is no such command: {' '.join(words)}")
    try:
        command.make_context(words[1], words[2:], resilient_parsing=False)
    except click.ClickException as exc:
        raise BlockError(f"{' '.join(words)}: {exc.format_message()}") from exc


def _check_curl(words: list[str]) -> None:
    if not any(word.startswith(LOCAL_URL) for word in words):
        raise BlockError(f"curl of another place than {LOCAL_URL} cannot be run: mark the block")


_RULES: Mapping[str, Rule] = {
    "ewsjf": _check_own,
    "ray": _check_ray,
    "curl": _check_curl,
}
