"""The command `init`: its files pass `check` and have comments, and it never overwrites a file."""

import contextlib
import subprocess
import sys
from collections.abc import Iterator
from email.message import Message
from pathlib import Path

import pytest
import yaml

from serve_app.cli import main, templates
from serve_app.cli.command import program
from serve_app.engines.emulated.engine import EmulatedEngineSettings
from serve_app.settings.application import ModelSettings, load_settings
from serve_app.settings.checking import check_file
from tests.cli.pages import answering
from tests.engines.emulated.endpoint import emulated_endpoint
from tests.engines.servers import free_port

ROOT = Path(__file__).resolve().parents[2]


def written(path: Path) -> ModelSettings:
    """Return the only model of a file, which must have no mistakes on any machine, and comments."""
    assert check_file(path, on_this_machine=False).mistakes == []
    comments = [line for line in path.read_text().splitlines() if line.strip().startswith("#")]
    assert len(comments) >= 8
    (model,) = load_settings(path).models
    return model


@pytest.mark.parametrize(
    ("options", "config"), [([], "local"), (["--emulated"], "local"), (["--gpus"], "gpu_1x")]
)
def test_a_template_is_a_file_of_the_clone_with_its_own_start_command(
    options: list[str], config: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, source = tmp_path / "x.yaml", ROOT / f"configs/{config}.yaml"
    assert main(["init", str(path), *options]) == 0
    assert [pool.name for pool in written(path).pools] == ["short", "long"]
    text = path.read_text()
    assert yaml.safe_load(text) == yaml.safe_load(source.read_text())
    assert f"\n#   {program()} serve {path}\n" in text
    assert "scripts/serve" not in text
    last = capsys.readouterr().out.splitlines()[-1]
    command = f"check {path}" if options == ["--gpus"] else f"serve {path}"
    assert last.startswith("next")
    assert last.endswith(f"{program()} {command}")


def test_requirements_that_this_machine_does_not_meet_are_listed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "x.yaml"
    monkeypatch.setattr("serve_app.settings.checking.gpu_names", list)
    assert main(["init", str(path), "--gpus"]) == 0
    shown = capsys.readouterr()
    assert "passes `check`, except for requirements that this machine does not meet" in shown.out
    assert "the pools need 1 GPUs, but this machine has none" in shown.err
    assert f"{path}:" in shown.err


def test_limits_that_exceed_the_gpu_are_listed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("serve_app.settings.checking.gpu_names", lambda: ["NVIDIA GeForce RTX 4090"])
    assert main(["init", str(tmp_path / "x.yaml"), "--gpus"]) == 0
    assert "lower max_model_len to 61440" in capsys.readouterr().err


@pytest.mark.parametrize("template", [templates.EMULATED, templates.GPUS], ids=lambda path: path.name)
def test_an_installed_copy_is_the_file_of_the_clone(template: Path) -> None:
    copied = f"cp configs/{template.name} {template.relative_to(ROOT)}"
    assert template.read_text() == (ROOT / "configs" / template.name).read_text(), copied


def test_a_file_is_not_overwritten_unless_forced(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "x.yaml"
    path.write_text("mine")
    assert main(["init", str(path), "--emulated"]) == 2
    assert "--force" in capsys.readouterr().err
    assert path.read_text() == "mine"
    assert main(["init", str(path), "--emulated", "--force"]) == 0
    assert written(path)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--servers", "http://127.0.0.1:9"], "does not respond"),
        (["--servers", "127.0.0.1:9"], "must begin with http://"),
        (["--servers", "http://127.0.0.1:9", "--api-key-env", "NO_SUCH_KEY"], "NO_SUCH_KEY is not set"),
    ],
)
def test_impossible_options_are_rejected_and_nothing_is_written(
    options: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "x.yaml"
    assert main(["init", str(path), *options]) == 2
    assert message in capsys.readouterr().err
    assert not path.exists()


@contextlib.contextmanager
def servers(*engines: EmulatedEngineSettings) -> Iterator[list[str]]:
    """Run emulated engines behind real servers; yield their addresses."""
    with contextlib.ExitStack() as stack:
        yield [stack.enter_context(emulated_endpoint(engine)) for engine in engines]


def engine(context: int, *names: str) -> EmulatedEngineSettings:
    return EmulatedEngineSettings(profile="laptop", max_model_len=context, served_model_names=names)


def test_servers_are_queried_and_become_pools(tmp_path: Path) -> None:
    path = tmp_path / "x.yaml"
    with servers(engine(8192, "a", "b"), engine(2048, "a", "b"), engine(4096, "c")) as urls:
        assert main(["init", str(path), "--servers", *(f"{url}/v1" for url in urls)]) == 0
    assert check_file(path, on_this_machine=False).mistakes == []
    first, second = load_settings(path).models
    assert (first.name, first.aliases, second.name) == ("a", ("b",), "c")
    found = [pool.engine.remote.endpoints for pool in first.pools if pool.engine.remote]
    assert found == [(urls[1],), (urls[0],)], "the shorter context comes first"
    assert first.scheduler.routing.b_short_tokens == 2048
    assert "context now: 8,192 tokens" in path.read_text()


def test_a_server_that_reports_no_context_is_the_longest_pool(tmp_path: Path) -> None:
    path = tmp_path / "x.yaml"

    def answer(_method: str, path: str, _headers: Message) -> tuple[int, object]:
        return (200, {"data": [{"id": "a", "object": "model"}]}) if path == "/v1/models" else (404, {})

    with answering(answer) as silent, servers(engine(4096, "a")) as urls:
        assert main(["init", str(path), "--servers", silent, *urls]) == 0
        short, long = written(path).pools
        assert short.engine.remote is not None
        assert long.engine.remote is not None
        assert (short.engine.remote.endpoints, long.engine.remote.endpoints) == (tuple(urls), (silent,))
        assert written(path).scheduler.routing.b_short_tokens == 4096
        assert "context now: not reported, so learned from rejections" in path.read_text()
        assert main(["init", str(path), "--force", "--servers", silent]) == 0
    assert [pool.name for pool in written(path).pools] == ["all"]


def test_a_server_that_does_not_answer_joins_the_others_if_they_are_alike(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, unused_url = tmp_path / "x.yaml", f"http://127.0.0.1:{free_port()}"
    with servers(engine(4096, "a"), engine(4096, "a"), engine(2048, "a")) as urls:
        assert main(["init", str(path), "--servers", urls[0], f"{unused_url}/v1", urls[1]]) == 0
        (pool,) = written(path).pools
        assert pool.engine.remote is not None
        assert pool.engine.remote.endpoints == (*urls[:2], unused_url)
        warned = capsys.readouterr().err
        assert f"{unused_url}/v1/models does not respond" in warned
        assert "it receives requests once it responds" in warned
        assert main(["init", str(path), "--force", "--servers", urls[0], unused_url, urls[2]]) == 2
        assert "does not respond" in capsys.readouterr().err
        mistyped = "http://no-such-host.invalid:8000"
        assert main(["init", str(path), "--force", "--servers", urls[0], mistyped]) == 2
        assert f"{mistyped}/v1/models does not respond" in capsys.readouterr().err


def test_servers_alike_are_one_pool_and_each_context_is_a_pool(tmp_path: Path) -> None:
    path = tmp_path / "x.yaml"
    with servers(engine(4096, "a"), engine(4096, "a"), engine(2048, "a"), engine(1024, "a")) as urls:
        assert main(["init", str(path), "--servers", *urls[:3]]) == 0
        short, long = written(path).pools
        assert short.engine.remote is not None
        assert long.engine.remote is not None
        assert (short.engine.remote.endpoints, long.engine.remote.endpoints) == ((urls[2],), tuple(urls[:2]))
        assert main(["init", str(path), "--force", "--servers", *urls]) == 0
    assert check_file(path, on_this_machine=False).mistakes == []
    (model,) = load_settings(path).models
    assert [pool.name for pool in model.pools] == ["up-to-1024", "up-to-2048", "up-to-4096"]
    found = [pool.engine.remote.endpoints for pool in model.pools if pool.engine.remote]
    assert found == [(urls[3],), (urls[2],), tuple(urls[:2])]
    assert model.scheduler.routing.b_short_tokens == 1024


@pytest.mark.parametrize("status", [200, 404])
def test_a_page_for_a_browser_is_not_copied_into_the_message(
    status: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    page = "<!DOCTYPE html><html><head><title>Welcome to nginx!</title></head></html>"
    with answering(lambda _method, _path, _headers: (status, page)) as url:
        assert main(["init", str(tmp_path / "x.yaml"), "--servers", url]) == 2
    message = capsys.readouterr().err
    assert "an HTML page, so this is another kind of server" in message
    assert "<" not in message


def test_a_configuration_can_be_printed() -> None:
    """/dev/stdout exists, and is no file that could be replaced."""
    line = [sys.executable, "-m", "serve_app", "init", "/dev/stdout", "--force"]
    ended = subprocess.run(line, cwd=ROOT, capture_output=True, text=True, timeout=60, check=True)
    assert ended.stdout.startswith("# The default: ")
    assert "\nproxy_location: Disabled\n" in ended.stdout
