"""Keys of Ray Serve's own blocks in the installed release, and messages about wrong ones."""

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

from serve_app.settings import checking
from serve_app.settings.application import IMPORT_PATH
from serve_app.settings.checking import Document, check_serve_keys


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


def test_a_list_is_no_configuration(tmp_path: Path) -> None:
    assert sentences(tmp_path, [1]) == [
        "is not a Ray Serve configuration: it must have a list `applications`"
    ]
