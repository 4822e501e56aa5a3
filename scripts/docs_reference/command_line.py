"""Command line reference, read from the parsers instead of their printed help.

Printed help is wrapped to the width of a terminal, so it would differ from one machine to the next.
"""

import argparse
import re
from collections.abc import Iterable

from docs_reference.markdown import code, document, prose, sentence, table
from serve_app.cli import COMMANDS, CommandEntry

_INTRODUCTION = """
# Command line reference

`ewsjf COMMAND` writes and serves configurations, inspects running applications, and runs
simulations. In a clone the program is `.venv/bin/ewsjf`.

Exit status: 0 for success, 1 if the command failed or reports a problem (as `status` and `replay` do), 2 for
invalid arguments or input, 130 if interrupted, 141 if the reader of the output has left.
"""

_DEFAULT_IN_HELP = re.compile(r"\s*\(default: %\(default\)[sg]\)")


def command_line_page() -> str:
    """Return the whole page."""
    rows = ((f"[{code(each.name)}](#{each.name})", sentence(each.summary)) for each in COMMANDS)
    return document(_INTRODUCTION, table(("Command", "What it does"), rows), *map(_section, COMMANDS))


def _section(entry: CommandEntry) -> str:
    command = entry.load()
    parser = argparse.ArgumentParser(prog=f"ewsjf {entry.name}", add_help=False)
    command.configure(parser)
    parts = [f"## {entry.name}", sentence(entry.summary), *_example(command.EXAMPLE)]
    for group in parser._action_groups:  # noqa: SLF001 - argparse names no public way to its groups
        if actions := group._group_actions:  # noqa: SLF001 - same
            title = (group.title or "options").capitalize()
            parts += [f"### {entry.name}: {title.lower()}", sentence(group.description or "")]
            parts.append(table(("Option", "Default", "Meaning"), map(_row, actions)))
    return "\n\n".join(part for part in parts if part)


def _example(epilog: str) -> Iterable[str]:
    """Yield the example as a block to copy, and the rest of the epilog."""
    example, _, rest = epilog.removeprefix("example:\n").partition("\n\n")
    lines = [line.removeprefix("  ") for line in example.splitlines()]
    shown = (line if line.startswith(" ") else f"$ {line}" for line in lines)
    yield "\n".join(("```console", *shown, "```"))
    yield from map(sentence, rest.split("\n\n"))


def _row(action: argparse.Action) -> tuple[str, str, str]:
    names = ", ".join(action.option_strings) or str(action.dest)
    if action.nargs != 0 and action.option_strings:
        names += f" {_placeholder(action)}"
    text = _DEFAULT_IN_HELP.sub("", action.help or "")
    return code(names), _default(action), prose(text % {**vars(action), "default": action.default})


def _placeholder(action: argparse.Action) -> str:
    if action.choices is not None:
        return "{" + ",".join(map(str, action.choices)) + "}"
    return str(action.metavar or action.dest.upper())


def _default(action: argparse.Action) -> str:
    """Return the default; empty for switches, and for None, which the help explains."""
    if action.required:
        return "required"
    if action.nargs == 0 or action.default in (None, []):
        return ""
    return prose(code(str(action.default)))
