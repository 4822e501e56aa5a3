"""Generated pages: equal to the code, and complete."""

import ast
import inspect
import re
from dataclasses import MISSING
from pathlib import Path
from typing import Any

import msgspec
import pytest
import yaml

import serve_app
from docs_reference import metrics, pages
from docs_reference.chart import SCHEMA, values_schema
from docs_reference.command_line import command_line_page
from docs_reference.configuration import CONFIGURATION_PAGES
from docs_reference.messages import Message, messages_of
from docs_reference.pages import PAGES, REFERENCE, outdated_pages, write_pages
from docs_reference.settings_tree import Block, blocks
from serve_app.errors import SettingsError
from serve_app.settings.application import load_settings
from tests.docs.fragments import check_fragment


def test_generated_pages_are_up_to_date() -> None:
    outdated = list(outdated_pages())
    assert not outdated, (
        f"run `scripts/docs generate`: {', '.join(outdated)} in {REFERENCE.name} would change"
    )


def test_the_chart_has_the_settings_of_the_code() -> None:
    assert SCHEMA.read_text(encoding="utf-8") == values_schema(), "run `scripts/docs generate`"


def test_a_page_that_was_edited_or_removed_is_outdated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pages, "PAGES", {f"{name}.md": lambda: "--trace" for name in ("a", "b", "c")})
    write_pages(tmp_path)
    assert list(outdated_pages(tmp_path)) == []
    (tmp_path / "a.md").write_text("--traces")
    (tmp_path / "c.md").unlink()
    assert list(outdated_pages(tmp_path)) == ["a.md", "c.md"]


def test_nothing_else_lies_among_the_generated_pages() -> None:
    assert {path.name for path in REFERENCE.iterdir()} == set(PAGES)


def test_the_width_of_the_terminal_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    wide = command_line_page()
    monkeypatch.setenv("COLUMNS", "40")
    assert command_line_page() == wide


def test_every_module_that_registers_metrics_is_in_the_reference() -> None:
    root = Path(inspect.getfile(serve_app)).parent
    registering = {
        f"serve_app.{str(path.relative_to(root).with_suffix('')).replace('/', '.')}"
        for path in root.rglob("*.py")
        if any(
            isinstance(node, ast.Name) and node.id == "CollectorRegistry"
            for node in ast.walk(ast.parse(path.read_text()))
        )
    }
    read = {module for module in registering if module in inspect.getsource(metrics)}
    # The reference reads what these register through the objects that use them.
    assert registering - read == {
        "serve_app.engines.emulated.driver",
        "serve_app.serving.gateway.request_log",
        "serve_app.serving.metric_cells",
        "serve_app.serving.scheduler.actor",
        "serve_app.serving.scheduler.metrics",
    }


def test_every_log_event_is_described() -> None:
    root = Path(inspect.getfile(serve_app)).parent
    written = {
        event for path in root.rglob("*.py") for event in re.findall(r"event=([a-z_]+)", path.read_text())
    }
    page = (REFERENCE.parent / "logs.md").read_text()
    missing = {event for event in written if f"`{event}`" not in page and f"`event={event}`" not in page}
    assert not missing


def _application(args: object, folder: Path) -> Path:
    path = folder / "serve.yaml"
    application = {"import_path": "serve_app.app:build_app", "args": args}
    path.write_text(yaml.safe_dump({"applications": [application]}))
    return path


POOL = {"name": "only", "engine": {"emulated": {}}}
MINIMAL = {"name": "demo", "pools": [POOL]}


def test_a_file_needs_no_more_than_what_the_reference_calls_required(tmp_path: Path) -> None:
    settings = load_settings(_application({"models": [MINIMAL]}, tmp_path))
    assert settings.models[0].scheduler.model == "demo"


@pytest.mark.parametrize("missing", ["models", "name", "pools", "pools.name", "pools.engine"])
def test_what_the_reference_calls_required_is_required(missing: str, tmp_path: Path) -> None:
    pool = {key: value for key, value in POOL.items() if f"pools.{key}" != missing}
    model = {key: value for key, value in {"name": "demo", "pools": [pool]}.items() if key != missing}
    with pytest.raises(SettingsError):
        load_settings(_application({} if missing == "models" else {"models": [model]}, tmp_path))


def test_omitted_settings_have_the_references_defaults(tmp_path: Path) -> None:
    small = [
        {"name": name, "engine": {"emulated": {"max_model_len": length}}}
        for name, length in (("short", 2_048), ("long", 8_192))
    ]
    remote = [{"name": "only", "engine": {"remote": {"endpoints": ["http://engine.example:8000"]}}}]
    vllm = [{"name": "only", "engine": {"vllm": {"model": "m"}}}]
    models = [
        {"name": f"m{number}", "aliases": [f"a{number}"], "pools": pools}
        for number, pools in enumerate((small, remote, vllm))
    ]
    found = load_settings(_application({"models": models}, tmp_path)).models
    for number, model in enumerate(found):
        for pool in model.pools:
            assert pool.engine.chosen.served_model_names == (f"m{number}", f"a{number}")
    assert [model.scheduler.routing.b_short_tokens for model in found] == [2_048, 8_192, 8_192]
    described = {
        setting.path.removeprefix("models[].pools[].engine.")
        for block in blocks()
        for setting in block.settings
        if setting.default_in_files == "the name and aliases of the model"
    }
    assert described == {"vllm.advanced.served_model_names", "remote.advanced.served_model_names"}


@pytest.mark.parametrize("block", tuple(blocks()), ids=lambda block: block.path or "args")
def test_the_parser_takes_every_setting_at_its_path(block: Block) -> None:
    own: dict[str, Any] = {}
    for setting in block.settings:
        if setting.default is MISSING or setting.blocks or setting.default is None:
            continue
        *advanced, name = setting.path.removeprefix(block.path).lstrip(".").split(".")
        place = own.setdefault(advanced[0], {}) if advanced else own
        place[name] = msgspec.to_builtins(setting.default)
    check_fragment(own, block.path.replace("[]", "[0]") or "args")


def test_every_setting_is_listed_once() -> None:
    page = "".join((REFERENCE / name).read_text() for name in CONFIGURATION_PAGES)
    paths = [setting.path for block in blocks() for setting in block.settings]
    assert len(paths) == len(set(paths))
    assert all(page.count(f"- **`{path}`** (") == 1 for path in paths)


def test_every_setting_is_documented() -> None:
    silent = [
        setting.path
        for block in blocks()
        for setting in block.settings
        if not setting.texts and not setting.blocks
    ]
    assert not silent, f"write a comment above {', '.join(silent)}, or an entry under Attributes of the class"


def test_messages_are_divided_into_problem_and_remedy() -> None:
    source = """
def check(name):
    message = f"the file {name} has no keys: create one with `ewsjf keys`"
    if name:
        raise SettingsError(message)
    if not name:
        raise EngineError("cannot read it: " + name)
    raise KeysFileError(f"the store answers: {name}")
    raise RuntimeError("a bug that no operator can repair: see the code")

@settings(block="keys")
class Keys:
    def __post_init__(self):
        raise ValueError(f"no key may be empty, got {self.key}")

class Digest:
    def __post_init__(self):
        raise ValueError("a fault of the program, not of a setting")
"""
    assert set(messages_of(source)) == {
        Message("no key may be empty, got …", ""),
        Message("the file … has no keys", "create one with `ewsjf keys`"),
        Message("the store answers: …", ""),
    }
