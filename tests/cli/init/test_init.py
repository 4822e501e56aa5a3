"""The command `init`: its files pass `check` and have comments, and it never overwrites a file."""

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator
from email.message import Message
from pathlib import Path

import pytest
import yaml

from serve_app.cli import main
from serve_app.cli.command import program
from serve_app.cli.init.document import PACKAGED_CONFIG, default_config
from serve_app.engines.emulated.engine import EmulatedEngineSettings
from serve_app.settings.application import ModelSettings
from serve_app.settings.checking import check_file
from serve_app.settings.loading import load_settings
from tests.cli.pages import answering
from tests.engines.emulated.endpoint import emulated_endpoint
from tests.engines.servers import free_port

ROOT = Path(__file__).resolve().parents[3]
END_S = 120.0

# Options, and the resulting contexts and engines by pool.
GPUS = {
    "two pools": (["--gpus", "8", "--max-model-len", "65536"], [(8_192, 6), (65_536, 2)]),
    "tensor parallel": (
        ["--gpus", "8", "--max-model-len", "131072", "--gpus-per-engine", "2"],
        [(8_192, 3), (131_072, 1)],
    ),
    "short context": (["--gpus", "4", "--max-model-len", "8192"], [(8_192, 4)]),
    "one engine": (["--gpus", "1"], [(32_768, 1)]),
}


def written(path: Path) -> ModelSettings:
    """Return the only model of a file, which must have no mistakes on any machine, and comments."""
    assert check_file(path, on_this_machine=False).mistakes == []
    comments = [line for line in path.read_text().splitlines() if line.strip().startswith("#")]
    assert len(comments) >= 8
    (model,) = load_settings(path).models
    return model


def test_emulated_engines_equal_those_of_configs_local(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, port = tmp_path / "x.yaml", free_port()
    assert main(["init", str(path), "--port", str(port)]) == 0
    assert [pool.name for pool in written(path).pools] == ["short", "long"]
    content, local = (yaml.safe_load(text.read_text()) for text in (path, ROOT / "configs/local.yaml"))
    assert content["http_options"].pop("port") == port
    assert local["http_options"].pop("port") == 8000
    assert content == local
    assert capsys.readouterr().out.splitlines()[-1] == f"next: {program()} serve {path}"
    assert "scripts/serve" not in path.read_text()


@pytest.mark.parametrize(
    "fleet", [["--emulated"], ["--gpus", "2", "--model", "meta-llama/Llama-3.1-8B-Instruct"]]
)
def test_an_address_that_others_reach_gets_keys_unless_it_is_to_be_open(
    fleet: list[str], tmp_path: Path
) -> None:
    keys, none = tmp_path / "keys.yaml", tmp_path / "none.yaml"
    here = ["--port", str(free_port()), "--host", "0.0.0.0"]
    assert main(["init", str(keys), *fleet, *here]) == 0
    assert main(["init", str(none), *fleet, *here, "--insecure"]) == 0
    assert [key.env for key in load_settings(keys).gateway.keys] == ["EWSJF_API_KEY_APP"]
    assert load_settings(none).gateway.insecure
    assert load_settings(none).gateway.keys == ()
    for path in (keys, none):
        assert check_file(path, on_this_machine=False).mistakes == []


def test_the_installed_copy_is_the_file_of_the_clone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    copied = "cp configs/local.yaml serve_app/cli/init/local.yaml"
    assert PACKAGED_CONFIG.read_text() == (ROOT / "configs/local.yaml").read_text(), copied
    monkeypatch.chdir(ROOT)
    assert default_config() == Path("configs/local.yaml")
    monkeypatch.chdir(tmp_path)
    assert default_config() == PACKAGED_CONFIG


@pytest.mark.parametrize(("options", "pools"), GPUS.values(), ids=GPUS)
def test_gpus_are_divided_among_pools(
    options: list[str],
    pools: list[tuple[int, int]],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    path = tmp_path / "x.yaml"
    assert main(["init", str(path), *options, "--model", "meta-llama/Llama-3.1-8B-Instruct"]) == 0
    model = written(path)
    assert model.name == "Llama-3.1-8B-Instruct"
    gpus = sum(pool.resources.num_gpus * (pool.replicas or 1) for pool in model.pools)
    assert gpus == int(options[1])
    assert [(pool.engine.max_model_len, pool.replicas) for pool in model.pools] == pools
    output = capsys.readouterr()
    # Test machines have fewer GPUs, or none at all.
    if "does not meet" in output.out:
        assert f"{path}:" in output.err
        assert output.out.splitlines()[-1].startswith("next, once they are met: ")


def listing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cards: list[str]) -> None:
    """Return a driver that lists these cards."""
    driver = tmp_path / "nvidia-smi"
    driver.write_text(f"#!/bin/sh\nprintf '%s\\n' {' '.join(repr(card) for card in cards)}\n")
    driver.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")


def test_the_gpus_come_from_the_driver(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    given = ["init", str(tmp_path / "x.yaml"), "--gpus", "--model", "owner/model"]
    for count, status in ((0, 2), (3, 0)):
        listing(tmp_path, monkeypatch, ["NVIDIA H100 80GB HBM3"] * count)
        assert main(given) == status
    assert "nvidia-smi lists no GPU here" in capsys.readouterr().err
    assert [pool.replicas for pool in written(tmp_path / "x.yaml").pools] == [2, 1]


def test_limits_on_a_known_gpu_fit_its_kv_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    listing(tmp_path, monkeypatch, ["NVIDIA H100 80GB HBM3"] * 4)
    path = tmp_path / "x.yaml"
    large = ["--gpus", "--model", "meta-llama/Llama-3.3-70B-Instruct", "--gpus-per-engine", "2"]
    assert main(["init", str(path), *large]) == 0
    short, long = written(path).pools
    for pool in (short, long):
        assert pool.engine.vllm is not None
        assert pool.engine.vllm.args["max_num_seqs"] < 30
        assert pool.engine.vllm.args["long_prefill_token_threshold"] == 192
    assert short.engine.max_model_len == 8_192
    assert 16_384 < (long.engine.max_model_len or 0) <= 32_768
    assert check_file(path, on_this_machine=False, gpu="h100").warnings == []
    capsys.readouterr()
    # A requested context is written even if it does not fit, with a warning.
    assert main(["init", str(path), *large, "--max-model-len", "131072", "--force"]) == 0
    assert written(path).pools[1].engine.max_model_len == 131_072
    assert "a context of 131,072 tokens exceeds the KV cache" in capsys.readouterr().err


def test_a_model_folder_states_its_context(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    # vLLM's own check of the arguments has its tests; importing vLLM takes half a minute of CPU time.
    monkeypatch.setattr("serve_app.engines.vllm.engine.is_installed", lambda: False)
    folder = tmp_path / "tiny"
    folder.mkdir()
    (folder / "config.json").write_text('{"max_position_embeddings": 2048}')
    given = ["--gpus", "2", "--model", str(folder)]
    assert main(["init", str(tmp_path / "x.yaml"), *given]) == 0
    assert written(tmp_path / "x.yaml").pools[0].engine.max_model_len == 2048
    assert main(["init", str(tmp_path / "y.yaml"), *given, "--max-model-len", "4096"]) == 2
    assert "exceeds the 2,048 tokens" in capsys.readouterr().err
    assert not (tmp_path / "y.yaml").exists()


def test_a_file_is_not_overwritten_unless_forced(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "x.yaml"
    path.write_text("mine")
    assert main(["init", str(path), "--emulated"]) == 2
    assert "--force" in capsys.readouterr().err
    assert path.read_text() == "mine"
    assert main(["init", str(path), "--emulated", "--force", "--port", str(free_port())]) == 0
    assert written(path)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--gpus", "2"], "--gpus needs --model"),
        (["--gpus", "2", "--model", "m", "--gpus-per-engine", "4"], "needs 4 GPUs, but --gpus is 2"),
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
        given = ["--servers", *(f"{url}/v1" for url in urls), "--port", str(free_port())]
        assert main(["init", str(path), *given]) == 0
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
