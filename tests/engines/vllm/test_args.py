"""Engine arguments on an argparse parser built like vLLM's; `test_real.py` uses vLLM's own."""

import argparse
from typing import Any

import pytest

from serve_app.engines.vllm.engine import REJECTED_ARGS, parse_arguments
from serve_app.errors import SettingsError


@pytest.fixture
def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="vLLM 0.32.0")
    parser.add_argument("--model")
    parser.add_argument("--max-model-len", type=int)
    parser.add_argument("--dtype", choices=["auto", "float32"], default="auto")
    parser.add_argument("--enforce-eager", action=argparse.BooleanOptionalAction, default=False)
    parser.add_argument(
        "--enable-prompt-tokens-details", action=argparse.BooleanOptionalAction, default=False
    )
    parser.add_argument("--disable-fastapi-docs", action=argparse.BooleanOptionalAction, default=False)
    parser.add_argument("--log-everything", action="store_true")
    parser.add_argument("--compilation-config")
    parser.add_argument("--allowed-media-domains", nargs="+")
    return parser


@pytest.mark.parametrize(
    ("name", "value", "parsed"),
    [
        ("max_model_len", 4096, 4096),
        ("max_model_len", "4096", 4096),
        ("dtype", "float32", "float32"),
        ("enforce_eager", True, True),
        ("enforce_eager", False, False),
        ("log_everything", True, True),
        ("log_everything", False, False),
        ("enable_prompt_tokens_details", False, False),
        ("compilation_config", {"mode": 0, "splitting_ops": []}, '{"mode": 0, "splitting_ops": []}'),
        ("allowed_media_domains", ["a.example", "b.example"], ["a.example", "b.example"]),
        ("max_model_len", None, None),
    ],
)
def test_a_value_is_parsed_as_if_it_had_been_typed(
    parser: argparse.ArgumentParser, name: str, value: Any, parsed: Any
) -> None:
    assert getattr(parse_arguments(parser, {name: value}), name) == parsed


def test_our_defaults_apply_unless_they_are_overridden(parser: argparse.ArgumentParser) -> None:
    args = parse_arguments(parser, {"disable_fastapi_docs": False}, ["--model=m"])
    assert args.enable_prompt_tokens_details is True
    assert args.disable_fastapi_docs is False
    assert args.model == "m"


def test_an_unknown_argument_is_named_with_the_nearest_known_ones(parser: argparse.ArgumentParser) -> None:
    with pytest.raises(
        SettingsError, match=r"args\.max_modle_len is not an argument.*did you mean max_model_len"
    ):
        parse_arguments(parser, {"max_modle_len": 1})


def test_an_abbreviation_is_not_guessed(parser: argparse.ArgumentParser) -> None:
    with pytest.raises(SettingsError, match=r"args\.max_model is not an argument"):
        parse_arguments(parser, {"max_model": 1})


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("max_model_len", "many", "--max-model-len: invalid int value: 'many'"),
        ("dtype", "float33", "--dtype: invalid choice: 'float33'"),
        ("dtype", True, r"args\.dtype must be a value, not true or false, got True"),
        ("enforce_eager", "yes", r"args\.enforce_eager must be true or false, got 'yes'"),
        ("dtype", None, r"args\.dtype is empty: remove it to keep the default 'auto'"),
    ],
)
def test_a_wrong_value_is_rejected_by_the_name_of_its_argument(
    parser: argparse.ArgumentParser, name: str, value: Any, message: str
) -> None:
    with pytest.raises(SettingsError, match=message):
        parse_arguments(parser, {name: value})


def test_a_rejection_neither_ends_the_process_nor_prints(
    parser: argparse.ArgumentParser, capfd: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SettingsError):
        parse_arguments(parser, {"max_model_len": "many"})
    assert capfd.readouterr() == ("", "")


def test_every_rejected_argument_has_a_remedy() -> None:
    assert all(REJECTED_ARGS.values())
