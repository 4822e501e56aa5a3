"""Package contents: every file that the code reads matches a pattern of pyproject.toml."""

import tomllib
from pathlib import Path

import serve_app
from serve_app import cli

ROOT = Path(serve_app.__file__).parent
PROJECT = tomllib.loads((ROOT.parent / "pyproject.toml").read_text())


def test_every_data_file_is_installed() -> None:
    (patterns,) = PROJECT["tool"]["setuptools"]["package-data"].values()
    installed = {path for pattern in patterns for path in ROOT.glob(pattern)}
    there = {path for path in ROOT.rglob("*") if path.is_file() and path.suffix not in {".py", ".pyc", ".md"}}
    assert there - installed == set()
    assert {"serve.env", "local.yaml", "gpu_1x.yaml", "laptop.yaml"} <= {path.name for path in installed}


def test_the_program_is_the_command_line() -> None:
    assert PROJECT["project"]["scripts"] == {"ewsjf": "serve_app.cli:main"}
    assert callable(cli.main)
