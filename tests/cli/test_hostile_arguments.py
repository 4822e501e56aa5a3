"""Every value of every argument of every command: a result or a message, and never a traceback.

The arguments come from the parsers, so those of a new command are tested without a change here, except for
`COMPLETE`. By default, each argument gets a few of the values; `-m slow` tries all of them.
"""

import argparse
import gzip
import os
import resource
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from email.message import Message
from pathlib import Path

import pytest

from experiments.common.application import free_port
from serve_app.cli import COMMANDS, _parser, main
from tests.cli.pages import answering

ROOT = Path(__file__).resolve().parents[2]
TEXTS = (
    *("", " ", "x", "é", "-1", "0", "1", "0.5", "nan", "inf", "-inf", "1e999", "1e300", "70000", "9" * 20),
    *("\0", ",", ":", "=", "%", "{", "a=b", "a=[", "a=-1", "8:1.2", "8:nan", "8:1e300", "[" * 3_000),
    *("short:1,long:1", "a:1:1:x", "a:" + "9" * 20, "2026-01-31", "9999-99-99", "a" * 300, "a/" * 3_000),
    *("http://", "http://[::1", "http://127.0.0.1:99999", "http://127.0.0.1:9", "http://a b/", "http://é/"),
)
FILES = {
    "empty": b"",
    "empty.yaml": b"",
    "bytes": bytes(range(256)),
    "bytes.yaml": bytes(range(256)),
    "words.yaml": b"just words",
    "list.yaml": b"[1, 2]",
    "documents.yaml": b"a: 1\n---\nb: 2\n",
    "deep.yaml": b"[" * 1_000,
    "deep.json": b'{"a":' * 20_000,
    "object.json": b'{"keys": 1}',
    "numbers.jsonl": b"1\n2\n",
    "objects.jsonl": b'{}\n{"timestamp": null}\n',
    "numbers.csv": b"arrival_s,prompt_tokens,output_tokens\nnan,1e999,-1\n",
    "cut.gz": gzip.compress(b"x" * 10_000)[:30],
}
NEW = ("new.yaml", "new.json")
"""Files that do not exist. They are written to an empty disk, and to a full one."""
PATHS = (
    *(f"hostile/{name}" for name in FILES),
    *("hostile", "hostile/missing", "hostile/missing/below.yaml", "hostile/empty/below.yaml"),
    # They cannot be read, or nothing can be created there, by root either.
    *("/proc/self/mem", "/proc/nowhere/x.yaml", *NEW),
)
SERVERS = {
    "html": "<html><body>" + "hello " * 500,
    "list": "[1]",
    "object": {},
    "objects": {"models": [{}], "data": [{}], "programs": [{}], "has_more": False},
}
GATEWAY = {
    "/v1/models": {"data": [{"id": "m"}]},
    "/debug/capture": '{"timestamp": 0, "input_length": 1, "output_length": 1}\n',
}
# Larger numbers are more work.
AMOUNTS = frozenset(
    ("--requests", "--seeds", "--jobs", "--duration", "--candidates", "--replicas", "--pools", "--rate")
)
ABOVE = frozenset(("70000", "1e300", "9" * 20, "a:" + "9" * 20))
LONG = {
    ("deploy", "--address"): "Ray waits for a minute at an address of another program",
    ("stop", "--address"): "Ray waits for a minute at an address of another program",
}
LAB = {"--trace": "trace.csv", "--requests": "4", "--jobs": "1", "--profile": "laptop"}
AT_GATEWAY = {"--url": "gateway"}
COMPLETE: dict[str, dict[str, str]] = {
    "init": {"path": "init.yaml"},
    "check": {"configs": "config.yaml"},
    "serve": {"config": "config.yaml"},
    "deploy": {"config": "config.yaml"},
    "stop": {},
    "status": AT_GATEWAY,
    "mode": AT_GATEWAY,
    "explain": {**AT_GATEWAY, "request_id": "x"},
    "batch": {**AT_GATEWAY, "action": "submit", "target": "requests.jsonl"},
    "capture": {**AT_GATEWAY, "--out": "captured.jsonl"},
    "keys": {"action": "create", "--file": "keys.json", "--tenant": "a"},
    "report": AT_GATEWAY,
    "simulate": {**LAB, "--replicas": "1"},
    "replay": {"log": "decisions.jsonl"},
    "plan": {**LAB, "--rate": "1", "--seeds": "1", "--candidates": "1", "--b-short": "1024"},
    "calibrate": {
        "--measurements": "measured.jsonl",
        "--out": "profile.yaml",
        "--kv-tokens": "10000",
        "--max-model-len": "4096",
    },
    "completion": {"shell": "bash"},
}
"""Arguments with which a command does all its work, by option or name; each test replaces one of them."""
DEFAULT_VALUES = 2


class NoSupervisor:
    """Replaces the part of `serve` that starts Ray, which takes half a minute."""

    def __init__(self, *_: object) -> None: ...

    async def run(self) -> int:
        return 0


@pytest.fixture(scope="module")
def servers() -> Iterator[dict[str, str]]:
    def gateway(_method: str, path: str, _headers: Message) -> tuple[int, object]:
        return 200, GATEWAY.get(path, {"models": [], "data": [], "programs": [], "has_more": False})

    with ExitStack() as stack:
        found = {"gateway": stack.enter_context(answering(gateway))}
        for name, content in SERVERS.items():
            found[name] = stack.enter_context(answering(lambda *_, content=content: (200, content)))
        yield found


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the working directory, with the files of `COMPLETE` and `PATHS`."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("serve_app.cli.serve.command.Supervisor", NoSupervisor)
    (tmp_path / "hostile").mkdir()
    for name, content in FILES.items():
        (tmp_path / "hostile" / name).write_bytes(content)
    config = (ROOT / "configs/local.yaml").read_text(encoding="utf-8")
    (tmp_path / "config.yaml").write_text(config.replace("port: 8000", f"port: {free_port()}"))
    rows = "".join(f"{place / 10},{100 + place},5\n" for place in range(4))
    (tmp_path / "trace.csv").write_text(f"arrival_s,prompt_tokens,output_tokens\n{rows}")
    request = '{"custom_id": "1", "method": "POST", "url": "/v1/chat/completions", "body": {}}\n'
    (tmp_path / "requests.jsonl").write_text(request)
    main(["simulate", *(f"{name}={value}" for name, value in LAB.items()), "--log=decisions.jsonl"])
    return tmp_path


def parser_of(command: str) -> argparse.ArgumentParser:
    (commands,) = (
        action for action in _parser([command])._actions if isinstance(action, argparse._SubParsersAction)
    )
    found: argparse.ArgumentParser = commands.choices[command]
    return found


def name_of(action: argparse.Action) -> str:
    return action.option_strings[-1] if action.option_strings else action.dest


def values_of(command: str, action: argparse.Action) -> list[str]:
    name = name_of(action)
    if action.nargs == 0 or (command, name) in LONG:
        return [""] if action.nargs == 0 else []
    if action.choices is not None:
        return [*map(str, action.choices), "x"]
    return [value for value in (*TEXTS, *PATHS, *SERVERS) if not (name in AMOUNTS and value in ABOVE)]


def line_of(command: str, action: argparse.Action, value: str, servers: dict[str, str]) -> list[str]:
    """Return a command with one of its arguments, and those that `COMPLETE` names and that it allows."""
    parser, name = parser_of(command), name_of(action)
    others = dict(COMPLETE[command])
    for group in parser._mutually_exclusive_groups:
        if action in group._group_actions:
            for excluded in map(name_of, group._group_actions):
                others.pop(excluded, None)
    given = {**others, name: value}
    words = [given[each.dest] for each in parser._actions if not each.option_strings and each.dest in given]
    for option, text in given.items():
        if option.startswith("--"):
            is_flag = option == name and action.nargs == 0
            words.append(option if is_flag else f"{option}={servers.get(text, text)}")
    if command == "init" and name != "--force":
        words.append("--force")
    return [command, *words]


def problem_of(line: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    """Run a command; return what is wrong with its end, or nothing."""
    try:
        status = main(line)
    except SystemExit as ended:
        status = ended.code if isinstance(ended.code, int) else -1
    except Exception as error:  # noqa: BLE001 - the subject of these tests
        return f"{line}: {error!r}"
    output = capsys.readouterr()
    if status not in {0, 1, 2} or "Traceback" in output.err or "<html" in output.err:
        return f"{line}: status {status}, {output.err[-300:]}"
    return ""


def actions_of(command: str) -> list[argparse.Action]:
    return [each for each in parser_of(command)._actions if not isinstance(each, argparse._HelpAction)]


@contextmanager
def full_disk() -> Iterator[None]:
    """Let no file grow, so that writes fail as on a full disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_every_command_is_complete() -> None:
    assert COMPLETE.keys() == {entry.name for entry in COMMANDS}


@pytest.mark.parametrize("every", [False, pytest.param(True, marks=pytest.mark.slow)])
@pytest.mark.parametrize("command", COMPLETE)
def test_no_value_ends_in_a_traceback(
    command: str, every: bool, folder: Path, servers: dict[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    problems = []
    for place, action in enumerate(actions_of(command)):
        values = values_of(command, action)
        if not every and len(values) > DEFAULT_VALUES:
            # Other values for each argument and command, so that all values occur.
            first = place * DEFAULT_VALUES + len(command) * 7
            values = [values[(first + step) % len(values)] for step in range(DEFAULT_VALUES)]
        for value in values:
            for name in NEW:
                Path(name).unlink(missing_ok=True)
            problems.append(problem_of(line_of(command, action, value, servers), capsys))
    assert list(filter(None, problems)) == []


@pytest.mark.parametrize("command", COMPLETE)
def test_a_full_disk_is_named_and_leaves_no_file(
    command: str, folder: Path, servers: dict[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    problems = []
    for action in actions_of(command):
        if action.nargs == 0 or action.choices is not None or (command, name_of(action)) in LONG:
            continue
        line = line_of(command, action, NEW[0], servers)
        for name in NEW:
            Path(name).unlink(missing_ok=True)
        with full_disk():
            problems.append(problem_of(line, capsys))
        if Path(NEW[0]).exists():
            problems.append(f"{line} leaves {NEW[0]}")
    assert list(filter(None, problems)) == []


def test_a_full_disk_keeps_what_was_there_and_names_the_remedy(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "mine.yaml").write_text("mine", encoding="utf-8")
    with full_disk():
        assert main(["init", "mine.yaml", "--force"]) == 2
        assert main(["serve", "config.yaml"]) == 2
    kept, started = capsys.readouterr().err.splitlines()[-3::2]
    assert kept == f"init: {folder}/mine.yaml cannot be written: File too large"
    assert started.endswith("cannot be written: File too large; choose another folder with TMPDIR")
    assert (folder / "mine.yaml").read_text(encoding="utf-8") == "mine"
    assert not list(folder.glob("mine.yaml.*"))


def test_output_that_cannot_be_written_and_a_deleted_folder_end_in_one_line(tmp_path: Path) -> None:
    script = f"mkdir gone; cd gone; rmdir ../gone; exec {sys.executable} -m serve_app completion bash"
    for place in ("/dev/full", "/dev/null"):
        ended = subprocess.run(
            f"{script} > {place}",
            shell=True,
            cwd=tmp_path,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            stderr=subprocess.PIPE,
            text=True,
            timeout=60,
            check=False,
        )
        full = "completion: input or output: No space left on device\n"
        assert (ended.returncode, ended.stderr) == ((2, full) if place == "/dev/full" else (0, ""))
