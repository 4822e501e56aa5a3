"""Command `serve` without a configuration: the default one, and servers as arguments."""

import asyncio
import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from email.message import Message
from pathlib import Path
from typing import Any

import httpx
import pytest

from experiments.common.application import free_port
from serve_app.cli import main, templates
from serve_app.cli.serve import command
from serve_app.cli.serve.command import HOST_VARIABLE, KEY_VARIABLE
from serve_app.settings.checking import CheckResult, check_file
from tests.cli.pages import answering
from tests.cli.serve.application import ROOT, configuration, on_terminal
from tests.engines.servers import serving
from tests.serving.gateway.builders import MODEL
from tests.serving.remote.servers import VllmLike


@pytest.fixture
def own_temp_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    for name in (HOST_VARIABLE, KEY_VARIABLE):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def checked(monkeypatch: pytest.MonkeyPatch, own_temp_folder: None) -> list[CheckResult]:
    """Check what would be served, instead of serving it."""
    found: list[CheckResult] = []

    def serve(config: Path, **_options: Any) -> int:
        found.append(check_file(config, on_this_machine=False))
        assert found[-1].mistakes == []
        return 0

    monkeypatch.setattr(command, "serve", serve)
    return found


def test_without_a_file_that_of_the_clone_or_the_installed_copy_is_served(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    served: list[Path] = []

    def serve(config: Path, **_options: Any) -> int:
        served.append(config)
        return 0

    monkeypatch.setattr(command, "serve", serve)
    for folder in (ROOT, tmp_path):
        monkeypatch.chdir(folder)
        assert main(["serve"]) == 0
    assert served == [Path("configs/local.yaml"), templates.EMULATED]


@contextlib.contextmanager
def server(*models: str) -> Iterator[str]:
    def answer(_method: str, path: str, _headers: Message) -> tuple[int, object]:
        data = [{"id": model, "max_model_len": 4096} for model in models]
        return (200, {"data": data}) if path == "/v1/models" else (404, {})

    with answering(answer) as url:
        yield url


def test_servers_of_different_models_are_served_side_by_side(
    checked: list[CheckResult], capsys: pytest.CaptureFixture[str]
) -> None:
    with server("a") as first, server("b", "adapter") as second:
        assert main(["serve", "--endpoints", f"{first}, {second}/v1/,"]) == 0
    assert checked[0].settings is not None
    assert list(checked[0].settings.served_names()) == ["a", "b", "adapter"]
    shown = capsys.readouterr()
    assert f"{first}: a\n{second}: b, adapter\n" in shown.out
    assert shown.err == ""


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ("host:8001", "the URL of a server must begin with http:// or https://, got 'host:8001'"),
        (" , ", "--endpoints needs at least one URL, such as http://host:8000"),
        ("http://127.0.0.1:9,http://127.0.0.1:10", "because no server responds: start it first"),
    ],
)
def test_unusable_endpoints_are_rejected_with_what_was_given(
    given: str, words: str, capsys: pytest.CaptureFixture[str], checked: list[CheckResult]
) -> None:
    assert main(["serve", "--endpoints", given]) == 2
    message = capsys.readouterr().err
    assert words in message
    assert "--servers" not in message
    assert all(url in message for url in given.split(",") if url.startswith("http://"))
    assert checked == []


def test_servers_are_observed_at_first_if_asked(
    checked: list[CheckResult], capsys: pytest.CaptureFixture[str]
) -> None:
    with server("a") as url:
        assert main(["serve", "--endpoints", url, "--observe"]) == 0
    assert checked[0].settings is not None
    assert checked[0].settings.models[0].scheduler.active_share == 0
    assert main(["serve", "configs/local.yaml", "--observe"]) == 2
    assert "--observe needs --endpoints" in capsys.readouterr().err


def test_a_container_listens_on_all_addresses_and_requires_the_key_that_it_is_given(
    monkeypatch: pytest.MonkeyPatch, checked: list[CheckResult], capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(HOST_VARIABLE, "0.0.0.0")
    with server("a") as url:
        assert main(["serve", "--endpoints", url]) == 0
        assert "set EWSJF_API_KEY_APP to require one" in capsys.readouterr().err
        monkeypatch.setenv(KEY_VARIABLE, "secret")
        assert main(["serve", "--endpoints", url]) == 0
        assert capsys.readouterr().err == ""
    for each, requires_keys in zip(checked, (False, True), strict=True):
        assert each.content["http_options"]["host"] == "0.0.0.0"
        assert each.settings is not None
        assert each.settings.gateway.requires_keys is requires_keys


def test_a_signal_ends_the_query_of_a_server_that_does_not_answer() -> None:
    """A container's first process ignores signals without a handler."""
    with socket.create_server(("127.0.0.1", 0)) as mute:
        url = f"http://127.0.0.1:{mute.getsockname()[1]}"
        line = [sys.executable, "-m", "serve_app", "serve", "--endpoints", url, "--port", str(free_port())]
        process = subprocess.Popen(line, cwd=ROOT, stderr=subprocess.PIPE, env=dict(os.environ))
        mute.settimeout(60)
        connection, _ = mute.accept()
        with connection:
            process.send_signal(signal.SIGTERM)
            _, message = process.communicate(timeout=30)
    assert (process.returncode, message) == (130, b"")


@pytest.mark.application
async def test_an_address_is_all_that_serve_needs() -> None:
    port = free_port()
    async with serving(VllmLike()) as server_url:
        with on_terminal("serve", "--endpoints", server_url, "--observe", "--port", str(port)) as opened:
            await asyncio.to_thread(opened.wait_for, "stop ")
            answer = await asyncio.to_thread(completion, port, MODEL)
            assert (answer.status_code, answer.headers["x-scheduled"]) == (200, "no")
            opened.process.send_signal(signal.SIGTERM)
            assert await asyncio.to_thread(opened.ended, 60.0) == 0
            assert opened.processes_left() == []


@pytest.mark.application
async def test_servers_that_are_discovered_late_do_not_end_the_start(tmp_path: Path) -> None:
    port, urls = free_port(), tmp_path / "urls"
    urls.write_text("")
    pool = {"name": "only", "engine": {"remote": {"endpoints": [f"file://{urls}"]}}}
    config = configuration(tmp_path, port, drain_s=5.0, pools=[pool])
    engine = VllmLike()
    engine.models = {"data": [{"id": name, "max_model_len": 4096} for name in ("demo", "gpt-4o-mini")]}
    async with serving(engine) as server_url:
        with on_terminal("serve", str(config)) as opened:
            await asyncio.to_thread(opened.wait_for, "No server is found so far for demo")
            assert (await asyncio.to_thread(completion, port, "demo")).status_code == 503
            urls.write_text(server_url)
            await asyncio.to_thread(wait_for_an_answer, port)
            opened.process.send_signal(signal.SIGTERM)
            assert await asyncio.to_thread(opened.ended, 60.0) == 0


def wait_for_an_answer(port: int) -> None:
    deadline = time.monotonic() + 60
    while (answer := completion(port, "demo")).status_code != 200:
        assert time.monotonic() < deadline, answer.text
        time.sleep(0.1)


def completion(port: int, model: str) -> httpx.Response:
    body = {"model": model, "prompt": "Hi", "max_tokens": 2}
    return httpx.post(f"http://127.0.0.1:{port}/v1/completions", json=body, timeout=60)
