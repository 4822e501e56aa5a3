"""The command `check`: one sentence per mistake with its line, and status 2."""

import socket
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from serve_app.cli import main
from serve_app.serving.api_keys import read_keys
from serve_app.settings.checking import check_file

ROOT = Path(__file__).resolve().parents[3]
LOCAL = (ROOT / "configs/local.yaml").read_text()

EMULATED = "emulated: {profile: laptop, max_model_len: 2048, advanced: {long_prefill_token_threshold: 192}}"

Check = Callable[[str], tuple[int, list[str]]]


@pytest.fixture
def check(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Check:
    def run(text: str) -> tuple[int, list[str]]:
        path = tmp_path / "config.yaml"
        path.write_text(text)
        status = main(["check", str(path)])
        output = capsys.readouterr()
        return status, (output.out + output.err).replace(str(path), "CONFIG").splitlines()

    return run


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port: int = server.getsockname()[1]
    return port


def local(**changes: str) -> str:
    """Return configs/local.yaml on a free port, with some texts replaced."""
    text = LOCAL.replace("port: 8000", f"port: {free_port()}")
    for old, new in changes.items():
        found = old.replace("__", ": ")
        assert found in text, f"configs/local.yaml has no {found!r} any more"
        text = text.replace(found, new, 1)
    return text


def line_of(text: str, part: str) -> int:
    return next(number for number, line in enumerate(text.splitlines(), 1) if part in line)


def test_a_good_configuration_is_fine(check: Check) -> None:
    assert check(local()) == (0, ["CONFIG is valid"])


def test_every_mistake_has_its_line(check: Check) -> None:
    text = local(
        applications="applicatoins_note: 1\napplications",
        aliases="alias",
        b_short_tokens="b_shrot_tokens",
    )
    status, lines = check(text)
    assert status == 2
    assert lines[0] == (
        f"CONFIG:{line_of(text, 'applicatoins_note')}: applicatoins_note is unknown to Ray Serve: "
        "did you mean applications?"
    )
    assert lines[1].startswith(f"CONFIG:{line_of(text, 'alias')}: models[0].alias")
    assert lines[2].startswith(
        f"CONFIG:{line_of(text, 'b_shrot_tokens')}: models[0].scheduler.routing.b_shrot_tokens"
    )
    assert "did you mean aliases?" in lines[1]
    assert len(lines) == 3


@pytest.mark.parametrize(
    ("uri", "expected"), [("gs://bucket/ewsjf", "install gcsfs"), ("nosuch://bucket", "nosuch")]
)
def test_a_store_whose_client_is_missing_is_named(check: Check, uri: str, expected: str) -> None:
    text = local(**{"# state_uri__/var/lib/ewsjf": f"state_uri: {uri}"})
    status, lines = check(text)
    assert status == 2
    assert any(f"state_uri {uri} cannot be used here" in line and expected in line for line in lines), lines
    assert check(text.replace(uri, "s3://bucket/ewsjf"))[0] == 0


def test_a_budget_whose_counts_a_restart_loses_is_a_warning(check: Check, tmp_path: Path) -> None:
    keys = tmp_path / "keys.json"
    text = local(**{"# state_uri__/var/lib/ewsjf": f"gateway: {{keys_file: {keys}}}"})
    assert check(text) == (0, ["CONFIG is valid"])
    for limit in ([], ["--tokens-per-day", "1000"]):
        assert main(["keys", "create", "--file", str(keys), "--tenant", "app", *limit]) == 0
    key = read_keys(keys)[1].id
    status, lines = check(text)
    assert status == 0
    assert any("each start counts the budget of the keys " + key in line for line in lines), lines
    assert check(f"{text}      state_uri: {tmp_path}\n")[1] == ["CONFIG is valid"]
    assert main(["keys", "revoke", key, "--file", str(keys)]) == 0
    assert check(text)[1][-1] == "CONFIG is valid"


def test_traces_need_their_package(check: Check, monkeypatch: pytest.MonkeyPatch) -> None:
    text = local(**{"# state_uri__/var/lib/ewsjf": "gateway: {tracing: true}"})
    assert check(text)[0] == 0
    # Makes the import fail.
    monkeypatch.setitem(sys.modules, "opentelemetry.exporter.otlp.proto.http.trace_exporter", None)
    status, lines = check(text)
    assert status == 2
    assert any("gateway.tracing is true" in line and "'ewsjf-serve[tracing]'" in line for line in lines), (
        lines
    )


def test_a_port_that_no_machine_has_is_named(check: Check) -> None:
    status, lines = check(LOCAL.replace("port: 8000", "port: 70000"))
    assert (status, len(lines)) == (2, 1)
    assert "http_options.port must be a whole number from 1 to 65535, got 70000" in lines[0]


def test_a_misspelt_profile_names_the_nearest_one(check: Check) -> None:
    text = local(profile__laptop="profile: labtop")
    status, lines = check(text)
    assert status == 2
    assert lines == [
        (
            f"CONFIG:{line_of(text, 'labtop')}: models[0].pools[0].engine.emulated: no engine profile "
            "'labtop': did you mean laptop? A path of a YAML file is also accepted"
        )
    ]


def test_a_port_in_use_is_reported_with_its_holder_and_setting(check: Check) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        text = LOCAL.replace("port: 8000", f"port: {port}")
        status, lines = check(text)
    assert status == 2
    assert lines[0].startswith(f"CONFIG:{line_of(text, 'port:')}: http_options.port {port} is in use by ")


def test_a_public_address_requires_keys(check: Check) -> None:
    open_to_all = LOCAL.replace("host: 127.0.0.1", "host: 0.0.0.0")
    status, lines = check(open_to_all)
    assert status == 2
    (line,) = lines
    assert line.startswith(
        f"CONFIG:{line_of(open_to_all, 'host: 0')}: http_options.host 0.0.0.0 is reachable"
    )
    assert "gateway.keys" in line
    assert "gateway.insecure" in line
    assert check(open_to_all + "      gateway: {insecure: true}\n")[0] == 0


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ("host: 127.0.0.1", "host: 192.0.2.1", "http_options.host '192.0.2.1'"),
        ("host: 127.0.0.1", 'host: "a\\0"', "is not an address of this machine"),
        ("gateways: ", "gateways: {num_cpus: 4000} #", "reserve 4000"),
        (EMULATED, "vllm: {model: owner/name, args: {max_model_len: 2048}}", "VLLM_CPU_KVCACHE_SPACE"),
        (
            "resources: ",
            "resources: {num_gpus: 2.0, num_cpus: 0.1} #",
            "the pools need 2 GPUs, but this machine has none",
        ),
    ],
)
def test_what_this_machine_cannot_do_is_named(
    check: Check, monkeypatch: pytest.MonkeyPatch, old: str, new: str, words: str
) -> None:
    monkeypatch.delenv("VLLM_CPU_KVCACHE_SPACE", raising=False)
    # No program lists GPUs.
    monkeypatch.setenv("PATH", "")
    text = local()
    assert old in text
    status, lines = check(text.replace(old, new, 1))
    assert status == 2
    assert any(words in line for line in lines), lines


def test_a_model_folder_that_is_not_there(check: Check) -> None:
    text = local().replace(
        EMULATED, "vllm: {model: ./nothere, args: {max_model_len: 2048}, env: {VLLM_CPU_KVCACHE_SPACE: '1'}}"
    )
    status, lines = check(text)
    assert status == 2
    assert f"CONFIG:{line_of(text, 'nothere')}: models[0].pools[0].engine.vllm.model: folder " in lines[0]


def test_an_engine_over_several_nodes_needs_a_cluster(check: Check, tmp_path: Path) -> None:
    text = local(
        resources__="resources: {num_cpus: 0.1, advanced: {placement_strategy: STRICT_SPREAD, "
        "placement_bundles: [{CPU: 1}, {CPU: 1}]}} #"
    )
    status, lines = check(text)
    assert status == 2
    assert lines[0].startswith(f"CONFIG:{line_of(text, 'STRICT_SPREAD')}: ")
    assert "2 nodes per replica, but this is one machine: use a cluster (`--address`)" in lines[0]
    path = tmp_path / "elsewhere.yaml"
    path.write_text(text)
    assert check_file(path, on_this_machine=False).mistakes == []


def test_another_machine_is_not_checked(tmp_path: Path) -> None:
    for config in sorted((ROOT / "configs").glob("*.yaml")):
        if config.name != "kuberay.yaml":
            assert check_file(config, on_this_machine=False).mistakes == []


def test_a_file_that_is_no_yaml_and_one_that_is_missing(check: Check, tmp_path: Path) -> None:
    status, lines = check("a: b: c\n")
    assert (status, lines[0].split(":")[1]) == (2, "1")
    assert main(["check", str(tmp_path / "nothere.yaml")]) == 2


def test_a_file_with_two_documents_is_named_with_the_line_of_the_second(check: Check) -> None:
    text = local()
    status, (line,) = check(f"{text}---\n{text}")
    assert status == 2
    number = len(text.splitlines()) + 1
    assert line.startswith(f"CONFIG:{number}: has several documents: remove this `---`")
