"""Environment inherited by Ray's processes."""

import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from experiments.common.application import free_port
from serve_app.cli import main
from serve_app.cli.serve.instance import default_settings, environment, instance_folder
from tests.cli.serve.application import configuration

ROOT = Path(__file__).parents[3]


def test_settings_of_the_user_count_more_than_ours() -> None:
    found = environment({"RAY_SERVE_CONTROL_LOOP_INTERVAL_S": "1", "HOME": "/h"})
    assert found["RAY_SERVE_CONTROL_LOOP_INTERVAL_S"] == "1"
    assert found["HOME"] == "/h"
    assert default_settings().keys() <= found.keys()


def test_modules_are_compiled_once_for_all_processes() -> None:
    assert "PYTHONDONTWRITEBYTECODE" not in environment({"PYTHONDONTWRITEBYTECODE": "1"})


def test_sockets_of_ray_fit_into_the_folder_of_an_instance() -> None:
    # Ray appends its session and a socket name; the kernel's limit is 107 bytes.
    assert len(str(instance_folder(65_535))) < 35


def test_a_shell_reads_the_settings_of_serve_as_we_do() -> None:
    # Clusters source the file before `ray start`.
    command = "set -a; . serve_app/cli/serve/serve.env; exec env -0"
    found = subprocess.run(["sh", "-c", command], cwd=ROOT, capture_output=True, check=True, text=True)
    variables = dict(entry.split("=", 1) for entry in found.stdout.split("\0") if entry)
    assert default_settings().items() <= variables.items()


POOL = {"name": "p", "engine": {"remote": {"api_key_env": "EWSJF_NO_KEY"}}}


@pytest.mark.parametrize(
    "changes",
    [
        {"gateway": {"keys": [{"tenant": "app", "env": "EWSJF_NO_KEY"}]}},
        {"gateway": {"advanced": {"metrics_key": {"env": "EWSJF_NO_KEY"}}}},
        {"models": [{"name": "m", "pools": [POOL]}]},
    ],
)
def test_a_missing_secret_is_named_before_the_start(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], changes: dict[str, Any]
) -> None:
    path = configuration(tmp_path, free_port(), drain_s=1.0)
    content = yaml.safe_load(path.read_text())
    content["applications"][0]["args"] |= changes
    path.write_text(yaml.safe_dump(content))
    assert main(["serve", str(path)]) == 2
    assert "environment variable EWSJF_NO_KEY" in capsys.readouterr().err
