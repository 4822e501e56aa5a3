"""Tests of every code block of every document; docs/writing.md has the rules.

A block without a rule fails, so that a typing error leaves none out.
"""

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from serve_app import cli
from tests.docs import code, documents, shell
from tests.docs.documents import ROOT, CodeBlock, blocks_in, code_blocks
from tests.docs.marks import BlockError, parse_mark
from tests.e2e.served import shared

BLOCKS = [block for document in documents.documents() for block in code_blocks(document)]
RUN_TIMEOUT_S = 120


def check(block: CodeBlock) -> None:
    """Check a block by the rule of its language.

    Raises:
        BlockError: it breaks the rule, or there is none.
    """
    mark = parse_mark(block.mark)
    applicable = {"console": {"run"}, "python": {"run"}, "yaml": {"settings"}}.get(block.language, set())
    if mark.word and not mark.is_not_run and mark.word not in applicable:
        raise BlockError(f"`test: {block.mark}` is no mark of a block of {block.language or 'no language'}")
    match block.language:
        case "console":
            is_run(block)
            for command in shell.commands(block.text):
                shell.check_command(command, anything_goes=mark.is_not_run)
        case "python":
            code.check_python(block.text)
        case "yaml":
            code.check_yaml(block.text, mark)
        case "json":
            code.check_json(block.text)
        case "promql":
            code.check_promql(block.text)
        case "text":
            pass
        case "":
            raise BlockError("no language: fence the block with ``` and a word such as console, yaml or text")
        case other if not mark.is_not_run:
            raise BlockError(f"no rule for {other}: add one to tests/docs/test_blocks.py, or mark the block")


def is_run(block: CodeBlock) -> bool:
    """Return whether it is executed: if a mark says so, or if it only sends requests to the application.

    Raises:
        BlockError: its mark is invalid, or it sends requests and does something else.
    """
    mark = parse_mark(block.mark)
    if mark.word:
        return mark.word == "run"
    if block.language == "console":
        return shell.is_request(block.text)
    return block.language == "python" and shell.LOCAL_URL in block.text


def _may_be_run(block: CodeBlock) -> bool:
    """Return `is_run`, but leave errors of the block to the first test."""
    try:
        return is_run(block)
    except BlockError:
        return False


@pytest.mark.parametrize("block", BLOCKS, ids=lambda block: f"{block.place}-{block.language}")
def test_a_block_follows_the_rule_of_its_language(block: CodeBlock) -> None:
    try:
        check(block)
    except BlockError as exc:
        pytest.fail(f"{block.place}: {exc}", pytrace=False)


@pytest.mark.application
@pytest.mark.parametrize(
    "block",
    [
        # Commands that documents mark, such as simulations, take long; requests do not.
        pytest.param(block, marks=[pytest.mark.slow] if block.mark else [], id=block.place)
        for block in BLOCKS
        if _may_be_run(block)
    ],
)
def test_a_block_that_can_be_run_works(
    block: CodeBlock, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    text = block.text
    if shell.LOCAL_URL in text:
        served = shared(request.config)
        served.wait_until_ready()
        text = text.replace(shell.LOCAL_URL, served.url)
    done = _run(block, text, tmp_path)
    assert done.returncode == 0, f"{block.place}: {done.stdout[-2000:]}{done.stderr[-2000:]}"


def _run(block: CodeBlock, text: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """Run a block in a folder of links to the repository, where its output does no harm."""
    for entry in ROOT.iterdir():
        if not entry.name.startswith(".") and entry.name not in {"out", "build"}:
            (folder / entry.name).symlink_to(entry)
    program = [sys.executable, "-c", text]
    if block.language == "console":
        extra = parse_mark(block.mark).detail
        lines = [f"{command} {extra}".strip() for command in shell.commands(text)]
        # A rejected request counts as a failure.
        functions = ["set -euo pipefail", 'curl() { command curl --fail-with-body "$@"; }']
        program = ["bash", "-c", "\n".join([*functions, *lines])]
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    return subprocess.run(
        program,
        cwd=folder,
        env={**os.environ, "PATH": path, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=RUN_TIMEOUT_S,
        check=False,
    )


def _block(text: str) -> CodeBlock:
    (block,) = blocks_in("page.md", text)
    return block


def _fenced(language: str, text: str, mark: str = "") -> str:
    comment = f"<!-- test: {mark} -->\n" if mark else ""
    return f"{comment}```{language}\n{text}\n```\n"


WRONG = {
    "an option that the command does not have": _fenced("console", "$ ewsjf status --urls x"),
    "a missing required option": _fenced("console", "$ ewsjf plan --trace lmsys"),
    "a command that does not exist": _fenced("console", "$ ewsjf fly"),
    "a wrong second line": _fenced("console", "$ ls\n$ ewsjf status \\\n    --nothing"),
    "a missing file": _fenced("console", "$ scripts/serve configs/nothing.yaml"),
    "a script that does not exist": _fenced("console", "$ scripts/nothing"),
    "an option that a script does not have": _fenced("console", "$ scripts/check --mend"),
    "a sub-command that a script does not have": _fenced("console", "$ scripts/docs publish"),
    "a marker of tests that does not exist": _fenced("console", "$ scripts/test -m quick"),
    "an unknown program": _fenced("console", "$ launch --all"),
    "an option that Ray does not have": _fenced("console", "$ ray up --fast cluster.yaml"),
    "an option that `ewsjf serve` does not have": _fenced("console", "$ scripts/serve --fast"),
    "a request to nowhere": _fenced("console", "$ curl http://gateway.example/v1/models"),
    "a request and something else": _fenced("console", "$ scripts/serve\n$ curl http://127.0.0.1:8000/ready"),
    "no prompt": _fenced("console", "scripts/serve"),
    "no language": _fenced("", "$ ls"),
    "an indented block": "text\n\n    $ ls\n",
    "a language without a rule": _fenced("fortran", "x"),
    "Python that does not compile": _fenced("python", "print("),
    "an import of nothing": _fenced("python", "from serve_app.errors import Nothing"),
    "YAML that nothing explains": _fenced("yaml", "scheduler: {}"),
    "an unknown setting": _fenced("yaml", "max_waitings: 3", "settings under models[0].scheduler"),
    "a setting out of range": _fenced("yaml", "state_interval_s: -1", "settings under args"),
    "a place that does not exist": _fenced("yaml", "name: x", "settings under models[4]"),
    "a file of settings that is rejected": _fenced("yaml", "applications: []"),
    "a mark without its reason": _fenced("console", "$ launch", "parse"),
    "a mark that is none": _fenced("console", "$ ls", "ignore"),
    "a mark of another language": _fenced("yaml", "args: {}", "run"),
    "a mark before a paragraph": "<!-- test: cloud -->\n\nText.\n\n" + _fenced("console", "$ launch"),
    "JSON with a comma too many": _fenced("json", "[1,]"),
    "a metric that does not exist": _fenced("promql", "rate(ewsjf_nothing_total[5m])"),
    "a bracket that does not close": _fenced("promql", "rate(ewsjf_dispatches_total[5m]"),
}


@pytest.mark.parametrize("text", WRONG.values(), ids=WRONG.keys())
def test_a_wrong_block_is_found(text: str) -> None:
    with pytest.raises(BlockError):
        check(_block(text))


RIGHT = {
    "a command with its output": _fenced("console", "$ ewsjf plan --help\nusage: any text"),
    "a marked unknown program": _fenced("console", "$ launch --all", "cloud, needs a cluster"),
    "settings in their place": _fenced("yaml", "max_waiting: 3", "settings under models[0].scheduler"),
    "another engine": _fenced(
        "yaml",
        "engine: {vllm: {model: m, args: {max_model_len: 65536}}}",
        "settings under models[0].pools[0]",
    ),
    "a variable and a pipe": _fenced("console", "$ X=1 ewsjf --version | tail -n 1 >out.txt"),
    "a query": _fenced("promql", 'sum by (le) (rate(ewsjf_queue_wait_seconds_bucket{model="a)"}[5m]))'),
}


@pytest.mark.parametrize("text", RIGHT.values(), ids=RIGHT.keys())
def test_a_right_block_passes(text: str) -> None:
    check(_block(text))


@pytest.mark.parametrize(
    ("text", "is_carried_out"),
    [
        (_fenced("console", "$ curl -s http://127.0.0.1:8000/ready | jq ."), True),
        (_fenced("console", "$ curl http://gateway.example/ready", "cloud"), False),
        (_fenced("console", "$ ewsjf --version"), False),
        (_fenced("console", "$ ewsjf --version", "run"), True),
        (_fenced("python", 'url = "http://127.0.0.1:8000/v1"'), True),
        (_fenced("python", "import serve_app"), False),
        (_fenced("yaml", "args: {}"), False),
    ],
)
def test_requests_and_marked_blocks_are_carried_out(text: str, is_carried_out: bool) -> None:
    assert is_run(_block(text)) == is_carried_out


def test_extra_arguments_belong_to_each_command_that_is_run(tmp_path: Path) -> None:
    block = _block(_fenced("console", "$ echo one\none\n$ echo \\\n    three", "run with two"))
    assert is_run(block)
    assert _run(block, block.text, tmp_path).stdout == "one two\nthree two\n"


# -- outputs of commands in documents and `--help`: only in ignored folders or outside the checkout -------

_OUTPUTS = ("json", "html", "records", "log", "out", "save_partition")
_OWN = re.compile(r"(?:\.venv/bin/)?ewsjf ")


def shown_commands() -> Iterator[tuple[str, str]]:
    """Yield the place of every shown command of ours, and the command."""
    for block in BLOCKS:
        if block.language == "console":
            for command in shell.commands(block.text):
                yield block.place, command.replace("\\\n", " ")
    for own in cli.COMMANDS:
        for command in own.load().EXAMPLE.replace("\\\n", " ").splitlines():
            yield f"{own.name} --help", command.strip()


def written_by(command: str) -> list[Path]:
    """Return the relative paths of files that a command writes."""
    _, *arguments = shlex.split(command, comments=True)
    redirected = []
    if ">" in arguments:
        place = arguments.index(">")
        arguments, redirected = arguments[:place], [Path(arguments[place + 1])]
    parsed = vars(shell.parse_own(arguments))
    given = [*(parsed.get(name) for name in _OUTPUTS), *redirected]
    return [path for path in given if isinstance(path, Path) and not path.is_absolute()]


def test_outputs_of_shown_commands_are_ignored_by_git() -> None:
    written = [
        (place, path) for place, own in shown_commands() if _OWN.match(own) for path in written_by(own)
    ]
    assert len(written) >= 5
    for place, path in written:
        # A path below the folder, because a pattern such as `out/` matches only folders.
        ignored = subprocess.run(
            ["git", "-C", str(ROOT), "check-ignore", "-q", str(path / "file")], check=False
        )
        assert ignored.returncode == 0, f"{place}: {path} would show up in `git status`: write to out/"
