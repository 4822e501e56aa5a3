"""The command `check`: one sentence per mistake with its line, and warnings about capacity."""

import re
import socket
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from ray.serve.schema import (
    HTTPOptionsSchema,
    LoggingConfig,
    ServeApplicationSchema,
    ServeDeploySchema,
    gRPCOptionsSchema,
)

from serve_app.cli import main
from serve_app.serving.api_keys import read_keys
from serve_app.settings import checking
from serve_app.settings.application import IMPORT_PATH, ApplicationSettings, settings_of
from serve_app.settings.checking import (
    Document,
    UnreadableError,
    check_capacity,
    check_file,
    check_serve_keys,
)

ROOT = Path(__file__).resolve().parents[2]
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


JWT = """\
gateway:
        jwt:
          issuer: https://login.example.com
          audience: llm-gateway
          jwks_url: https://login.example.com/certs
          tenant_claim: department
          groups:
            - {name: users, tokens_per_day: 1000}
"""


def with_jwt(old: str = "", new: str = "") -> str:
    """Return configs/local.yaml with logins, and a text of them replaced."""
    assert old in JWT
    return local(**{"# state_uri__/var/lib/ewsjf": JWT.replace(old, new, 1) if old else JWT})


def test_logins_are_valid_and_replace_keys(check: Check, tmp_path: Path) -> None:
    text = with_jwt()
    status, lines = check(text)
    assert status == 0
    budget = "gateway.jwt.groups: without a state_uri, each start counts the budget of the groups users from"
    assert any(budget in line for line in lines), lines
    assert check(f"{text}      state_uri: {tmp_path}\n")[1] == ["CONFIG is valid"]
    assert check(text.replace("host: 127.0.0.1", "host: 0.0.0.0"))[0] == 0


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ("issuer: https://login.example.com", "issuer: ''", "issuer must not be empty"),
        ("audience: llm-gateway", "", "gateway.jwt.audience is missing"),
        ("tenant_claim: department", "tenant_claim: ''", "tenant_claim must not be empty: name the claim"),
        ("tenant_claim:", "tenant_clam:", "gateway.jwt.tenant_clam: unknown key; did you mean tenant_claim?"),
        ("jwks_url: https://login.example.com/certs", "", "one of jwks_url, jwks_file must be set; got none"),
        ("jwks_url:", "jwks_file: /a\n          jwks_url:", "must be set; got jwks_url and jwks_file"),
        ("https://login.example.com/certs", "http://login.example.com/c", "must be an https URL, or http on"),
        ("https://login.example.com/certs", "file:///etc/certs", "got 'file:///etc/certs'"),
        ("https://login.example.com/certs", "https://", "must be an https URL"),
        ("https://login.example.com/certs", "http://[::1", "must be an https URL"),
        ("jwks_url: https://login.example.com/certs", "jwks_file: certs.json", "must be an absolute path"),
        ("jwks_url: https://login.example.com/certs", "jwks_file: /no/certs", "cannot be used: No such file"),
        ("- {name: users, tokens_per_day: 1000}", "[]", "groups must not be empty: name at least one group"),
        ("name: users, ", "", "gateway.jwt.groups[0].name is missing"),
        ("name: users", "name: ''", "gateway.jwt.groups[0]: name must not be empty"),
        ("tokens_per_day: 1000", "tokens_per_day: 0", "groups[0].tokens_per_day must be at least 1, got 0"),
        ("tokens_per_day: 1000", "token_per_day: 1", "did you mean tokens_per_day?"),
        ("tokens_per_day: 1000", "highest_class: high", "must be one of interactive, default, batch, got 'h"),
        ("tokens_per_day: 1000", "weight: 0", "weight must be from 1e-06 to 1,000,000.0, got 0"),
        (
            "tokens_per_day: 1000",
            "highest_class: batch, advanced: {default_class: default}",
            "default_class default is above highest_class batch",
        ),
        ("1000}", "1000}\n            - {name: users}", "groups has the name users twice: merge them"),
    ],
)
def test_mistakes_of_logins_are_named_with_their_line(check: Check, old: str, new: str, words: str) -> None:
    status, lines = check(with_jwt(old, new))
    assert status == 2
    assert any(re.match(r"CONFIG:\d+: gateway\.jwt", line) and words in line for line in lines), lines


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


def test_http_options_that_are_no_mapping_are_a_mistake_with_a_line(check: Check) -> None:
    text = local(http_options="http_options: 8000\ncontroller_options")
    place = f"CONFIG:{line_of(text, 'http_options: 8000')}"
    assert check(text) == (2, [f"{place}: http_options must be a mapping of settings, got 8000"])


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


def test_a_mistake_of_the_machine_has_its_line_beside_another_application(check: Check) -> None:
    text = local(
        applications="applications:\n  - {name: other, import_path: other:app} #",
        resources="resources: {num_gpus: 99} #",
    )
    status, lines = check(text)
    assert status == 2
    assert lines[0].startswith(f"CONFIG:{line_of(text, 'num_gpus: 99')}: the pools need 99 GPUs")


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


# -- lines of a YAML file, and its syntax errors ----------------------------------------------------------


def document(folder: Path, text: str) -> Document:
    path = folder / "config.yaml"
    path.write_text(text)
    return Document(path)


def rejection(folder: Path, text: str) -> tuple[str, int | None]:
    with pytest.raises(UnreadableError) as caught:
        document(folder, text)
    return caught.value.mistake.message, caught.value.mistake.line


def test_a_sentence_is_placed_at_the_key_with_which_it_begins(tmp_path: Path) -> None:
    found = document(tmp_path, "a:\n  b:\n    - c: 1\n    - d: 2\n      e: 3\n")
    assert found.mistake(("a",), "b[1].e must be positive, got 3").line == 5
    assert found.mistake(("a",), "b[1].f is missing").line == 4
    assert found.mistake(("a",), "two names are the same").line == 1


def test_keys_of_a_merged_block_have_the_line_of_that_block(tmp_path: Path) -> None:
    text = "base: &base\n  port: 1\nother:\n  <<: *base\n  host: x\n"
    found = document(tmp_path, text)
    assert found.line(("other", "port")) == 2
    assert found.line(("other", "host")) == 5
    assert found.mistakes == []


def test_a_repeated_key_is_a_mistake(tmp_path: Path) -> None:
    (mistake,) = document(tmp_path, "a:\n  port: 1\n  host: x\n  port: 2\n").mistakes
    assert (mistake.line, mistake.message) == (
        4,
        "port is duplicated in this block, first in line 2: remove one",
    )


def test_a_slip_in_the_yaml_is_one_sentence_with_its_line(tmp_path: Path) -> None:
    assert rejection(tmp_path, "a:\n  b: 1\n\tc: 2\n") == (
        "is not valid YAML: found character '\\t' that cannot start any token: indent with spaces",
        3,
    )
    message, line = rejection(tmp_path, "a: 1\n  b: 2\n")
    assert line == 2
    assert message.startswith("is not valid YAML: mapping values are not allowed here: check the indentation")
    assert rejection(tmp_path, "a: [1, 2\n")[1] is not None
    assert rejection(tmp_path, "a: 2026-13-45")[0] == "is not valid YAML: month must be in 1..12"


def test_a_missing_file_names_those_beside_it(tmp_path: Path) -> None:
    (tmp_path / "local.yaml").write_text("")
    with pytest.raises(UnreadableError, match=r"file not found: .* has local\.yaml"):
        Document(tmp_path / "locla.yaml")


def test_a_file_that_is_no_text_is_rejected(tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    path.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(UnreadableError, match="cannot be read"):
        Document(path)


# -- keys of Ray Serve's own blocks in the installed release ----------------------------------------------


@pytest.mark.parametrize(
    ("known", "schema"),
    [
        (checking.TOP, ServeDeploySchema),
        (checking.HTTP_OPTIONS, HTTPOptionsSchema),
        (checking.GRPC_OPTIONS, gRPCOptionsSchema),
        (checking.LOGGING_CONFIG, LoggingConfig),
        (checking.APPLICATION, ServeApplicationSchema),
    ],
)
def test_the_keys_are_those_of_the_installed_release(known: frozenset[str], schema: Any) -> None:
    assert known == set(schema.model_fields)


def sentences(folder: Path, content: Any) -> list[str]:
    path = folder / "config.yaml"
    path.write_text(yaml.safe_dump(content))
    return [mistake.message for mistake in check_serve_keys(Document(path), IMPORT_PATH)]


APPLICATION = {"name": "ewsjf", "import_path": IMPORT_PATH, "args": {}}


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"http_options": {"prot": 1}}, "http_options.prot is unknown to Ray Serve: did you mean port?"),
        (
            {"http_options": {"port": "x"}},
            "http_options.port must be a whole number from 1 to 65535, got 'x'",
        ),
        ({"http_options": {"host": 1}}, "http_options.host must be a string such as 127.0.0.1, got 1"),
        ({"http_options": 8000}, "http_options must be a mapping of settings, got 8000"),
        (
            {"proxy_location": "Head"},
            (
                "proxy_location must be Disabled, because gateways listen on http_options.port themselves, "
                "got 'Head'"
            ),
        ),
        (
            {"http_options": {"request_timeout_s": 5}},
            "http_options.request_timeout_s is not supported: use queue_timeout_s instead",
        ),
        ({"aplications": []}, "aplications is unknown to Ray Serve: did you mean applications?"),
        ({"applications": None}, "applications must be a list, got None"),
        ({"applications": [1]}, "applications[0] must be a mapping of settings, got 1"),
        (
            {"applications": [APPLICATION, APPLICATION]},
            f"applications exactly one entry must have import_path: {IMPORT_PATH}, got 2",
        ),
        (
            {"applications": [{**APPLICATION, "rout_prefix": "/"}]},
            "applications[0].rout_prefix is unknown to Ray Serve: did you mean route_prefix?",
        ),
        (
            {"applications": [{"name": "x"}]},
            f"applications[0] has no import_path: add import_path: {IMPORT_PATH}",
        ),
    ],
)
def test_mistakes_have_helpful_messages(tmp_path: Path, change: dict[str, Any], sentence: str) -> None:
    assert sentence in sentences(tmp_path, {"applications": [APPLICATION], **change})


@pytest.mark.parametrize("path", [5, "extension", "extension:", "serve_app.app:build_ap"])
def test_an_import_path_that_is_no_application_is_a_mistake(tmp_path: Path, path: object) -> None:
    found = sentences(tmp_path, {"applications": [{**APPLICATION, "import_path": path}]})
    advice = f"must be {IMPORT_PATH}, or MODULE:NAME of an extension, got {path!r}"
    assert f"applications[0].import_path {advice}" in found


def test_a_list_is_no_configuration(tmp_path: Path) -> None:
    assert sentences(tmp_path, [1]) == [
        "is not a Ray Serve configuration: it must have a list `applications`"
    ]


# -- capacity warnings of `check` and `serve`: what an engine cannot hold, with figures and remedy --------
LARGE = "meta-llama/Llama-3.3-70B-Instruct"
SMALL = "meta-llama/Llama-3.1-8B-Instruct"


def pool(name: str = "short", *, model: str = LARGE, gpus: float = 2, **args: Any) -> dict[str, Any]:
    if gpus > 1:
        args.setdefault("tensor_parallel_size", int(gpus))
    found: dict[str, Any] = {
        "name": name,
        "engine": {"vllm": {"model": model, "args": args}},
        "resources": {"num_gpus": gpus},
    }
    return found


def application(*pools: dict[str, Any]) -> ApplicationSettings:
    return settings_of({"models": [{"name": "m", "pools": list(pools)}]})


def warned(*pools: dict[str, Any], card: str | None = "h100") -> list[str]:
    return list(check_capacity(application(*pools), card))


def test_a_context_beyond_the_cache_is_reported_with_what_would_hold_it() -> None:
    (output,) = warned(pool(max_model_len=131_072, gpu_memory_utilization=0.9, max_num_batched_tokens=2_048))
    assert output.startswith("models[0].pools[0].engine.vllm.args.max_model_len: a context of 131,072 tokens")
    assert "about 2" in output
    assert "set tensor_parallel_size to 4" in output
    assert "fp8" not in output, "58,000 tokens are too few as well"
    (output,) = warned(pool(max_model_len=30_000))
    assert "set kv_cache_dtype to fp8" in output
    assert warned(pool(max_model_len=30_000, kv_cache_dtype="fp8")) == []


def test_without_a_limit_the_context_is_the_models_own() -> None:
    assert "131,072" in warned(pool())[0]
    assert warned(pool(max_model_len=-1)) == [], "vLLM chooses what fits"
    assert warned(pool(max_model_len="auto")) == []


def test_weights_that_do_not_fit_are_reported_with_the_sum() -> None:
    (output,) = warned(pool(gpus=1, max_model_len=8_192))
    assert output.startswith(
        "models[0].pools[0].engine.vllm.args: on 1 x h100 weights and KV cache do not fit"
    )
    assert "141.1 GB" in output


def test_more_sequences_than_the_cache_carries_are_reported() -> None:
    (output,) = warned(pool(max_model_len=8_192, max_num_seqs=256))
    assert output.startswith(
        "models[0].pools[0].engine.vllm.args.max_num_seqs: 256 sequences of typically 1,400"
    )
    assert "about 32,000 besides the weights: lower it to 22, or" in output
    assert warned(pool(max_model_len=8_192, max_num_seqs=16)) == []
    # Requests limited to 64 tokens need less.
    assert warned(pool(max_model_len=64, max_num_seqs=256)) == []


def test_engines_that_share_a_card_must_not_claim_more_than_their_fraction() -> None:
    half: dict[str, Any] = {"model": SMALL, "gpus": 0.5, "max_model_len": 8_192}
    (output,) = warned(pool(**half, gpu_memory_utilization=0.6))
    assert output.startswith("models[0].pools[0].resources.num_gpus: an engine with 0.5 of a GPU")
    assert warned(pool(**half, gpu_memory_utilization=0.5)) == []
    assert warned(pool(**half, kv_cache_memory_bytes=10_000_000_000)) == []
    assert "69%" in warned(pool(**half, kv_cache_memory_bytes=40_000_000_000))[0]


@pytest.mark.parametrize(
    "changes",
    [
        {"model": "someone/unknown-model"},
        {"quantization": "awq"},
        {"pipeline_parallel_size": 2},
        {"kv_cache_dtype": "fp8_ds_mla"},
        {"dtype": "float8"},
        {"gpu_memory_utilization": "most"},
        {"tensor_parallel_size": 3},
        {"gpus": 0},
    ],
)
def test_unknown_setups_give_no_warning(changes: dict[str, Any]) -> None:
    given: dict[str, Any] = {"max_model_len": 131_072, "gpu_memory_utilization": 0.9, **changes}
    assert warned(pool(**given)) == []


def test_the_card_is_the_pools_own_or_that_of_the_machine() -> None:
    bad = pool(max_model_len=131_072)
    assert warned(bad, card=None) == []
    assert warned(bad, card="NVIDIA of tomorrow") == []
    assert warned(bad, card="NVIDIA H200") == []
    bad["resources"]["accelerator_type"] = "A100-80G"
    assert "a100" in warned(bad, card=None)[0]
    assert "a100" in warned(bad, card="NVIDIA H200")[0]


def config(tmp_path: Path, *, context: int) -> Path:
    text = (ROOT / "configs/gpu_8x.yaml").read_text()
    path = tmp_path / "config.yaml"
    path.write_text(text.replace("max_model_len: 131072", f"max_model_len: {context}"))
    return path


def test_the_command_warns_with_a_line_and_does_not_fail(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = config(tmp_path, context=600_000)
    line = path.read_text().splitlines().index("                    max_model_len: 600000") + 1
    assert main(["check", "--skip-machine-checks", "--gpu", "H100", str(path)]) == 0
    output = capsys.readouterr()
    assert output.err.startswith(
        f"{path}:{line}: warning: models[0].pools[1].engine.vllm.args.max_model_len: "
    )
    assert output.out == f"{path} is valid, with warnings\n"
    assert main(["check", "--skip-machine-checks", str(path)]) == 0
    assert capsys.readouterr() == (f"{path} is valid\n", "")


def test_an_unknown_card_is_rejected_with_those_that_are_known(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["check", "--gpu", "voodoo2", "configs/gpu_8x.yaml"])
    assert "'voodoo2' is not a known GPU: use one of a100, h100" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("cards", "is_warned"),
    [
        (["NVIDIA H100 80GB HBM3"] * 8, True),
        (["NVIDIA H100 80GB HBM3", "NVIDIA L40S"], False),
        ([], False),
    ],
)
def test_the_gpus_of_this_machine_are_detected(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cards: list[str], is_warned: bool
) -> None:
    monkeypatch.setattr("serve_app.settings.checking.gpu_names", lambda: cards)
    path = config(tmp_path, context=600_000)
    assert bool(check_file(path).warnings) == is_warned
    assert check_file(path, on_this_machine=False).warnings == []


def test_the_start_warns_before_anything_else(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = config(tmp_path, context=600_000)
    text = path.read_text().replace("num_gpus: 4.0}", "num_gpus: 4.0, accelerator_type: H100}")
    # Another mistake in the file rejects the start on any machine, so nothing is started.
    path.write_text(text.replace("http_options:", "http_option:"))
    assert main(["serve", str(path)]) == 2
    output = capsys.readouterr().err
    assert "warning: models[0].pools[1].engine.vllm.args.max_model_len: a context of 600,000 tokens" in output
    assert "http_option is unknown" in output
