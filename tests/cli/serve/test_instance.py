"""Instance files, by which applications on a machine find each other."""

import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest

from experiments.common.application import free_port
from serve_app.cli import main
from serve_app.cli.serve.instance import instance_folder, register, running_instances, unregister
from tests.cli.serve.application import ROOT, configuration


@pytest.fixture(autouse=True)
def own_temp_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))


def published(port: int) -> Path:
    folder = instance_folder(port)
    folder.mkdir(parents=True)
    register(f"http://127.0.0.1:{port}", Path("config.yaml"), folder, 600.0, ("demo",))
    return folder


def test_a_running_application_is_found_until_it_withdraws() -> None:
    folder = published(8000)
    (found,) = running_instances()
    assert (found.url, found.pid, found.folder) == ("http://127.0.0.1:8000", os.getpid(), str(folder))
    unregister(folder)
    assert list(running_instances()) == []


def test_the_file_of_a_process_that_is_gone_counts_for_nothing() -> None:
    folder = published(8000)
    file = folder / "instance.json"
    file.write_text(file.read_text().replace(f'"pid":{os.getpid()}', '"pid":999999999'))
    (instance_folder(8001)).mkdir()
    (instance_folder(8001) / "instance.json").write_text("{")
    assert list(running_instances()) == []


def test_check_names_the_running_application_whose_port_a_file_has(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    port = free_port()
    published(port)
    own = configuration(tmp_path, port, drain_s=1.0)
    assert main(["check", str(own)]) == 0
    assert f"deploy {own}" in capsys.readouterr().out
    other = tmp_path / "other.yaml"
    other.write_text(
        (ROOT / "configs/remote.yaml").read_text().replace("port: 8000", f"port: {port}"), encoding="utf-8"
    )
    assert main(["check", str(other)]) == 2
    printed = capsys.readouterr()
    assert "deploy" not in printed.out
    assert f"port {port} is in use by another application" in printed.err
    assert "config.yaml), which serves demo: choose another port, or stop that one" in printed.err
    assert main(["check", "--skip-machine-checks", str(other)]) == 0


def test_an_application_is_found_while_the_disk_is_full() -> None:
    published(8000)
    published(8001)

    def fill() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))

    # No file can grow in this process.
    stopped = subprocess.run(
        [sys.executable, "-m", "serve_app", "stop"],
        preexec_fn=fill,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert "choose one with --url: http://127.0.0.1:8000, http://127.0.0.1:8001" in stopped.stderr


def test_stop_lists_what_it_could_stop(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["stop"]) == 2
    assert "no application of this user runs on this machine" in capsys.readouterr().err
    published(8000)
    published(8001)
    assert main(["stop"]) == 2
    assert "choose one with --url: http://127.0.0.1:8000, http://127.0.0.1:8001" in capsys.readouterr().err
    assert main(["stop", "--url", "http://localhost:9"]) == 2
    assert "no application of this user runs at http://localhost:9" in capsys.readouterr().err
