"""The command line: its commands, their help and messages, and progress bars."""

import errno
import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

import serve_app
from serve_app.cli import COMMANDS, CommandEntry, main
from serve_app.cli.command import program, progress_bar, write_text
from tests.engines.servers import free_port

ROOT = Path(__file__).resolve().parents[2]


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *arguments], capture_output=True, text=True, timeout=60, check=False
    )


@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: command.name)
def test_every_command_has_help_with_an_example(
    command: CommandEntry, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main([command.name, "--help"])
    assert ended.value.code == 0
    out = capsys.readouterr().out
    assert f"  {program()} {command.name} " in out.partition("example:\n")[2]


def test_the_module_runs_and_prints_its_version() -> None:
    done = run("-m", "serve_app", "--version")
    assert (done.returncode, done.stdout.strip()) == (0, serve_app.__version__)


def test_the_help_lists_the_commands() -> None:
    done = run("-m", "serve_app", "--help")
    assert all(command.name in done.stdout for command in COMMANDS)


@pytest.mark.parametrize(
    ("arguments", "message", "help_of"),
    [
        (("plan", "--rate", "1"), "the following arguments are required: --trace", " plan"),
        (("simulate", "--rate", "-1"), "argument --rate: must be a number above 0, got '-1'", " simulate"),
        (("serve", "--port", "99999"), "argument --port: must be at most 65535, got '99999'", " serve"),
        (("simulate", "--trace", "lmsys", "--relicas=3"), "(did you mean --replicas?)", " simulate"),
        (("explain",), "one of the arguments request_id --program is required", " explain"),
        (("explain", "r", "--program", "p"), "--program: not allowed with argument request_id", " explain"),
        (("fly",), "invalid choice: 'fly'", ""),
    ],
)
def test_wrong_arguments_are_answered_in_one_line_that_names_the_help(
    arguments: tuple[str, ...], message: str, help_of: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert ended.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "error:" in line
    assert message in line
    assert line.endswith(f"{help_of} --help")


def test_asking_for_help_loads_no_heavy_library() -> None:
    script = (
        "import sys\n"
        "from serve_app.cli import _parser\n"
        "_parser().format_help()\n"
        "print(sorted({'ray', 'vllm', 'torch', 'matplotlib', 'sklearn'} & set(sys.modules)))"
    )
    assert run("-c", script).stdout.strip() == "[]"


def test_a_command_imports_no_other_command() -> None:
    script = (
        "import sys\n"
        "from serve_app.cli import COMMANDS, main\n"
        "assert main(['completion', 'bash']) == 0\n"
        "print([entry.name for entry in COMMANDS if entry.module in sys.modules])"
    )
    assert run("-c", script).stdout.splitlines()[-1] == "['completion']"


@pytest.fixture
def installed(tmp_path: Path) -> Path:
    """Return a folder with the program of an installation."""
    path = tmp_path / "ewsjf"
    path.write_text(
        # As pip writes it, because the interpreter's path may contain a space.
        f"#!/bin/sh\n'''exec' {shlex.quote(sys.executable)} \"$0\" \"$@\"\n' '''\n"
        f"import sys\nsys.path.insert(0, {str(ROOT)!r})\n"
        "from serve_app.cli import main\nsys.exit(main())\n",
        encoding="utf-8",
    )
    path.chmod(0o755)
    return tmp_path


@pytest.mark.parametrize("in_the_clone", [True, False])
def test_suggested_commands_work_in_a_new_terminal(tmp_path: Path, in_the_clone: bool) -> None:
    folder, fresh = ROOT if in_the_clone else tmp_path, {"PATH": "/usr/bin:/bin"}
    called = [sys.executable, "-m", "serve_app", "check", "--help"]
    helped = subprocess.run(
        called,
        cwd=folder,
        env={**fresh, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    named = helped.stdout.removeprefix("usage: ").partition(" check ")[0]
    assert f"  {named} check configs/local.yaml" in helped.stdout
    again = subprocess.run(
        f"{named} --version", shell=True, cwd=folder, env=fresh, capture_output=True, timeout=60, check=False
    )
    assert again.returncode == 0, again.stderr


def test_a_reader_that_leaves_ends_the_command_without_a_message() -> None:
    reader, writer = os.pipe()
    os.close(reader)
    ended = subprocess.run(
        [sys.executable, "-m", "serve_app", "completion", "bash"],
        stdout=writer,
        stderr=subprocess.PIPE,
        text=True,
        timeout=60,
        check=False,
    )
    os.close(writer)
    assert (ended.returncode, ended.stderr) == (141, "")


def test_without_a_command_the_commands_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 0
    listed = capsys.readouterr().out
    assert all(f"\n    {command.name}" in listed for command in COMMANDS)


@pytest.mark.parametrize(
    ("typed", "offered"),
    [
        ("ewsjf cal", ["calibrate"]),
        ("ewsjf completion ", ["bash", "zsh", "fish"]),
        ("ewsjf status --fr", ["--freeze-tuner"]),
        ("ewsjf check conf", ["config.yaml"]),
    ],
)
def test_the_script_for_bash_completes_commands_options_and_files(
    installed: Path, typed: str, offered: list[str]
) -> None:
    (installed / "config.yaml").touch()
    script = (
        'eval "$(ewsjf completion bash)"\n'
        "COMP_LINE=$1 COMP_POINT=${#1} COMP_TYPE=9\n"
        'read -r -a COMP_WORDS <<<"$1"; [ "${1: -1}" != " " ] || COMP_WORDS+=("")\n'
        "COMP_CWORD=$((${#COMP_WORDS[@]} - 1))\n"
        "complete -p ewsjf >complete; [[ $(cat complete) =~ -F\\ ([^ ]+) ]] || exit 1\n"
        '${BASH_REMATCH[1]} ewsjf "${COMP_WORDS[COMP_CWORD]}" ""\n'
        'printf "%s\\n" "${COMPREPLY[@]}"\n'
    )
    done = subprocess.run(
        ["bash", "-c", script, "bash", typed],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        cwd=installed,
        env={**os.environ, "PATH": f"{installed}:{os.environ['PATH']}"},
    )
    assert [line.strip() for line in done.stdout.splitlines()] == offered, done.stderr


@pytest.mark.parametrize(("shell", "marker"), [("zsh", "compdef"), ("fish", "complete --command ewsjf")])
def test_other_shells_have_a_script_in_their_own_words(
    shell: str, marker: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["completion", shell]) == 0
    assert marker in capsys.readouterr().out


@pytest.mark.parametrize("address", ["127.0.0.1:{port}", "ray://127.0.0.1:{port}", "127.0.0.1:99999"])
def test_stop_names_an_address_where_nothing_listens(
    address: str, capsys: pytest.CaptureFixture[str]
) -> None:
    address = address.format(port=free_port())
    assert main(["stop", "--address", address]) == 2
    assert f"there is no Ray cluster at {address}: " in capsys.readouterr().err


def test_a_replaced_file_keeps_its_permissions(tmp_path: Path) -> None:
    path = tmp_path / "result.json"
    path.write_text("old")
    path.chmod(0o600)
    write_text(path, "new")
    assert (path.read_text(), path.stat().st_mode & 0o777) == ("new", 0o600)
    assert list(tmp_path.iterdir()) == [path]


def test_a_file_is_written_if_its_name_leaves_no_room_for_a_draft(tmp_path: Path) -> None:
    path = tmp_path / ("a" * 255)
    write_text(path, "new")
    assert path.read_text() == "new"


def test_a_file_that_cannot_be_replaced_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Renaming to a file that is mounted into a container fails in this way."""

    def busy(_draft: Path, _path: Path) -> None:
        raise OSError(errno.EBUSY, os.strerror(errno.EBUSY))

    monkeypatch.setattr(Path, "replace", busy)
    path = tmp_path / "result.json"
    path.write_text("old")
    write_text(path, "new")
    assert path.read_text() == "new"
    assert list(tmp_path.iterdir()) == [path]


# -- progress bars of long commands: work done, time left, and silence in a pipe --------------------------

SIMULATE = ["simulate", "--trace", "paper-mix", "--profile", "laptop", "--replicas", "1", "--requests", "150"]


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    # rich then treats any output as a terminal.
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "120")


def plain(shown: str) -> str:
    """Strip colours and cursor movements."""
    return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", shown)


def bars(shown: str) -> dict[str, tuple[int, int]]:
    """Return the last state of each bar: steps done and total."""
    found = re.findall(r"([a-z][a-z0-9. ]*?) [━╸╺ ]+ *(\d+)/(\d+) ", plain(shown))
    return {name: (int(done), int(total)) for name, done, total in found}


@pytest.mark.usefixtures("terminal")
def test_a_bar_shows_the_remaining_time(capsys: pytest.CaptureFixture[str]) -> None:
    with progress_bar("steps", 4) as advance:
        advance()
        advance(3)
    assert re.search(r"4/4 \d:\d\d:\d\d left \d:\d\d:\d\d", plain(capsys.readouterr().err))


@pytest.mark.usefixtures("terminal")
def test_a_single_run_counts_its_requests(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*SIMULATE, "--load", "0.8"]) == 0
    assert bars(capsys.readouterr().err) == {"rates at load 1.0": (1, 1), "requests": (150, 150)}


@pytest.mark.usefixtures("terminal")
def test_runs_one_after_the_other_count_all_their_requests(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out.json"
    arguments = ["--rate", "5", "--policy", "direct,fcfs", "--seeds", "2", "--jobs", "1", "--json", str(out)]
    assert main([*SIMULATE, *arguments]) == 0
    assert bars(capsys.readouterr().err) == {"rates at load 1.0": (2, 2), "requests": (600, 600)}
    assert [run["whole_run"]["completed"] for run in json.loads(out.read_text())["runs"]] == [150] * 4


@pytest.mark.usefixtures("terminal")
def test_a_replay_counts_decisions(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    log = tmp_path / "log.jsonl"
    assert main([*SIMULATE, "--policy", "fcfs,ewsjf", "--rate", "5", "--log", str(log)]) == 0
    decisions = len(log.read_text().splitlines()) - 2
    capsys.readouterr()
    assert main(["replay", str(log)]) == 0
    assert bars(capsys.readouterr().err) == {"decisions": (decisions, decisions)}


def test_a_pipe_sees_no_bar(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*SIMULATE, "--load", "0.8"]) == 0
    assert capsys.readouterr().err == ""
