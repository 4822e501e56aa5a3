"""`check --probe`: queries remote servers, and `check` without it."""

from collections.abc import Callable
from email.message import Message
from pathlib import Path

import pytest
import yaml

from serve_app.cli import main
from tests.cli.pages import answering
from tests.engines.servers import free_port

Check = Callable[..., tuple[int, list[str]]]
CONFIG = (Path(__file__).resolve().parents[2] / "configs/remote.yaml").read_text()
REMOTE = "models[0].pools[{}].engine.remote.endpoints[{}]"


@pytest.fixture
def check(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Check:
    """Check an application whose pools have these servers."""

    def run(*pools: list[str], options: tuple[str, ...] = (), **remote: object) -> tuple[int, list[str]]:
        content = yaml.safe_load(CONFIG)
        (model,) = content["applications"][0]["args"]["models"]
        model["name"] = "tiny"
        model["pools"] = [
            {"name": f"pool{number}", "engine": {"remote": {"endpoints": urls, **remote}}}
            for number, urls in enumerate(pools)
        ]
        path = tmp_path / "config.yaml"
        path.write_text(yaml.safe_dump(content))
        status = main(["check", "--skip-machine-checks", *options, str(path)])
        output = capsys.readouterr()
        return status, (output.out + output.err).replace(str(path), "CONFIG").splitlines()

    return run


def answers(_method: str, path: str, headers: Message) -> tuple[int, object]:
    """Answer as a server of the model `tiny` that accepts no wrong key."""
    if headers.get("authorization", "Bearer right") != "Bearer right":
        return 401, {}
    return (200, {"data": [{"id": "tiny"}]}) if path == "/v1/models" else (404, {})


def test_servers_that_can_be_used_are_fine(check: Check) -> None:
    with answering(answers) as url:
        assert check([url, "dns+http://name.invalid:8000"], options=("--probe",)) == (0, ["CONFIG is valid"])
        assert check([f"{url}/v1"], options=("--probe",), advanced={"api_key": "right"})[0] == 0


def test_servers_that_cannot_be_used_are_named_with_the_remedy(check: Check) -> None:
    def lists_another(_method: str, path: str, _headers: Message) -> tuple[int, object]:
        return (200, {"data": [{"id": "other"}]}) if path == "/v1/models" else (404, {})

    def serves_pages(_method: str, _path: str, _headers: Message) -> tuple[int, object]:
        return 404, "<html>"

    dead = f"http://127.0.0.1:{free_port()}"
    with answering(answers) as good, answering(lists_another) as other, answering(serves_pages) as website:
        pools = [good, dead], [other, website]
        assert check(*pools) == (0, ["CONFIG is valid"])
        status, lines = check(*pools, options=("--probe",))
    assert (status, len(lines)) == (2, 3), lines
    assert lines[0].endswith(
        f": {REMOTE.format(0, 1)}: {dead}/v1/models gave no answer: Connection refused: start its server, or "
        "correct the URL"
    )
    # With the line in the file.
    assert lines[0].startswith("CONFIG:")
    assert lines[0].split(":")[1].isdigit()
    lacking = (
        f"{REMOTE.format(1, 0)}: {other} serves other but not tiny: start it with --served-model-name tiny"
    )
    assert lacking in lines[1]
    assert f"{REMOTE.format(1, 1)}: {website}/v1/models returned 404, " in lines[2]
    assert lines[2].endswith(": correct the URL if this is no OpenAI-compatible server")


def test_a_wrong_key_and_one_that_is_not_set_are_named(check: Check, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NO_SUCH_KEY", raising=False)
    with answering(answers) as url:
        status, lines = check([url], options=("--probe",), advanced={"api_key": "wrong"})
        assert (status, len(lines)) == (2, 1)
        assert "returned 401: set api_key to the server's key" in lines[0]
        status, lines = check([url], options=("--probe",), api_key_env="NO_SUCH_KEY")
    assert (status, len(lines)) == (2, 1)
    assert "api_key_env: the environment variable NO_SUCH_KEY is not set" in lines[0]


@pytest.mark.parametrize("again", ["http://gpu-1:8000/v1/", "http://gpu-1:8000"])
def test_an_endpoint_in_two_pools_of_a_model_is_named_without_a_query(check: Check, again: str) -> None:
    status, lines = check(["http://gpu-1:8000", "http://gpu-2:8000"], ["http://gpu-3:8000", again])
    assert (status, len(lines)) == (2, 1)
    assert lines[0].endswith(
        f"{REMOTE.format(1, 1)}: {again} is an endpoint of pool pool0 too, so its capacity would count "
        "twice: remove it from one of the pools"
    )


def test_the_same_discovery_in_two_pools_is_named_and_other_endpoints_are_not(check: Check) -> None:
    assert check(["dns+http://a:8000"], ["dns+http://a:8000"])[0] == 2
    assert check(["http://a:8000", "http://a:8000"], ["http://a:8001", "http://a:8000/other"])[0] == 0


def test_two_models_may_have_the_same_endpoint(tmp_path: Path) -> None:
    """A provider has one address for all its models."""
    content = yaml.safe_load(CONFIG)
    models = content["applications"][0]["args"]["models"]
    (first,) = models[0]["pools"]
    models.append({**models[0], "name": "another", "pools": [{**first, "name": "another"}]})
    path = tmp_path / "config.yaml"
    path.write_text(yaml.safe_dump(content))
    assert main(["check", "--skip-machine-checks", str(path)]) == 0


def test_the_help_has_an_example(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["check", "--help"])
    shown = capsys.readouterr().out
    assert "check --probe configs/remote.yaml" in shown
