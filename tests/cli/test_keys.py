"""`ewsjf keys`: the life of a key, from creation to revocation."""

import json
import re
from pathlib import Path
from types import SimpleNamespace

import pytest

from serve_app.cli import keys, main
from serve_app.serving.api_keys import is_secret_of, parsed_hash, read_keys

CONFIG = """
applications:
  - name: app
    import_path: serve_app.app:build_app
    args:
      gateway: {{keys_file: {path}}}
      models:
        - name: demo
          pools: [{{name: short, engine: {{emulated: {{}}}}}}]
"""


def created(capsys: pytest.CaptureFixture[str], path: Path, *options: str) -> str:
    """Create a key and return its secret."""
    assert main(["keys", "create", "--file", str(path), "--tenant", "app", *options]) == 0
    out = capsys.readouterr()
    assert out.out.count("\n") == 1
    assert str(path) in out.err
    return out.out.strip()


def test_the_address_selects_one_of_several_applications(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    instances = []
    for number in (1, 2):
        config = tmp_path / f"{number}.yaml"
        config.write_text(CONFIG.format(path=tmp_path / f"{number}.json"))
        created(capsys, tmp_path / f"{number}.json", "--name", f"of application {number}")
        instances.append(SimpleNamespace(url=f"http://127.0.0.1:{number}", config=str(config)))
    monkeypatch.setattr(keys, "running_instances", lambda: iter(instances))
    assert main(["keys", "list", "--url", "http://127.0.0.1:2"]) == 0
    assert "of application 2" in capsys.readouterr().out
    assert main(["keys", "list"]) == 2
    assert "pass --file with the file of keys, --config, or --url" in capsys.readouterr().err


def test_a_key_is_created_listed_and_revoked(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "keys.json"
    options = ("--requests-per-minute", "60", "--model", "demo", "--highest-class", "batch", "--admin")
    limits = ("--cost-per-day", "2.5", "--ttft-target-s", "0.5", "--weight", "2", "--expires-in-days", "30")
    secret = created(capsys, path, *options, *limits, "--name", "night", "--floor-tokens-per-s", "1500")
    (key,) = read_keys(path)
    assert is_secret_of(secret.encode(), *parsed_hash(key.hash))
    assert (key.admin, key.may_act_for_tenants, key.models) == (True, False, ("demo",))
    assert (key.cost_per_day, key.ttft_target_s, key.floor_tokens_per_s) == (2.5, 0.5, 1500)

    assert main(["keys", "list", "--file", str(path), "--json"]) == 0
    shown = capsys.readouterr().out
    assert secret not in shown
    (listed,) = json.loads(shown)
    assert (listed["status"], listed["requests_per_minute"], listed["name"]) == ("valid", 60, "night")
    assert "hash" not in listed
    assert main(["keys", "list", "--file", str(path)]) == 0
    table = capsys.readouterr().out
    assert "requests_per_minute=60, cost_per_day=2.5" in table
    assert re.search(r"\| valid +\| 2 +\| 1,500 +\| batch", table)

    assert main(["keys", "revoke", listed["id"], "--file", str(path)]) == 0
    assert [key.status() for key in read_keys(path)] == ["revoked"]


def test_the_file_is_the_one_that_a_configuration_names(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, config = tmp_path / "keys.json", tmp_path / "app.yaml"
    config.write_text(CONFIG.format(path=path))
    assert main(["keys", "create", "--config", str(config), "--tenant", "app"]) == 0
    assert len(read_keys(path)) == 1
    capsys.readouterr()


@pytest.mark.parametrize(
    ("text", "instead"),
    [
        ("serve_app.app:build_app", "an_extension:build_app"),
        ("applications:", "applications:\n  - {name: other, import_path: other:app}"),
    ],
)
def test_the_application_may_have_an_extension_or_others_beside_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str, instead: str
) -> None:
    path, config = tmp_path / "keys.json", tmp_path / "app.yaml"
    created(capsys, path, "--name", "night")
    config.write_text(CONFIG.format(path=path).replace(text, instead))
    assert main(["keys", "list", "--config", str(config)]) == 0
    assert "night" in capsys.readouterr().out


@pytest.mark.parametrize(
    "applications", ["null", "[1]", "[]", "{}", "[{import_path: a:a}, {import_path: b:b}]"]
)
def test_a_file_without_an_application_of_this_project_is_rejected(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], applications: str
) -> None:
    config = tmp_path / "app.yaml"
    config.write_text(f"applications: {applications}")
    assert main(["keys", "list", "--config", str(config)]) == 2
    assert f"{config} must have exactly one application" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["create", "--file", "FILE"], "pass --tenant"),
        (["create", "--file", "FILE", "--tenant", "a b"], "tenant must be"),
        (["revoke", "--file", "FILE"], "pass the id of the key to revoke"),
        (["revoke", "abc", "--file", "FILE"], "cannot be read"),
        (["list", "--file", "FILE"], "cannot be read"),
    ],
)
def test_an_impossible_action_is_explained_in_a_sentence(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], words: str
) -> None:
    given = [str(tmp_path / "keys.json") if each == "FILE" else each for each in arguments]
    assert main(["keys", *given]) == 2
    assert words in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []
