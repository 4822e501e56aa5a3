import subprocess
import sys

import pytest

import serve_app
from serve_app.cli import COMMANDS, main
from serve_app.command import Command


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *arguments], capture_output=True, text=True, timeout=60, check=False
    )


@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: command.name)
def test_every_command_has_help_with_an_example(command: Command, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main([command.name, "--help"])
    assert ended.value.code == 0
    out = capsys.readouterr().out
    assert f"  python -m serve_app {command.name} " in out.partition("example:\n")[2]


def test_the_module_runs_and_prints_its_version() -> None:
    done = run("-m", "serve_app", "--version")
    assert (done.returncode, done.stdout.strip()) == (0, serve_app.__version__)


def test_the_help_lists_the_commands() -> None:
    done = run("-m", "serve_app", "--help")
    assert all(command.name in done.stdout for command in COMMANDS)


@pytest.mark.parametrize("arguments", [(), ("fly",), ("bench",), ("bench", "--rate", "-1")])
def test_wrong_usage_ends_with_status_2_and_a_message(
    arguments: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert ended.value.code == 2
    assert "error:" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message", "help_of"),
    [
        (("bench", "--url", "http://x"), "the following arguments are required: --trace", " bench"),
        (("bench", "--rate", "-1"), "argument --rate: must be a number above 0, got '-1'", " bench"),
        (("simulate", "--trace", "lmsys", "--relicas=3"), "(did you mean --replicas?)", " simulate"),
        (("fly",), "invalid choice: 'fly'", ""),
        ((), "COMMAND", ""),
    ],
)
def test_wrong_arguments_are_answered_in_one_line_that_names_the_help(
    arguments: tuple[str, ...], message: str, help_of: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        main(arguments)
    (line,) = capsys.readouterr().err.splitlines()
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
