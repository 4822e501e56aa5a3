"""Private interfaces of Ray, uvicorn and vLLM: each is used in one place for a reason, and still exists.

A failure after a library update names what breaks; docs/upgrading.md describes what to do.
"""

import ast
import importlib
from collections.abc import Iterator
from pathlib import Path

import pytest
from ray.serve import Deployment
from ray.serve._private.client import ServeControllerClient

ROOT = Path(__file__).resolve().parents[1] / "serve_app"
HOMES = {"serving/_ray.py", "engines/vllm/library.py"}
LIBRARIES = {"ray", "uvicorn", "vllm"}

RAY = {
    "ray.serve._private.constants:SERVE_CONTROLLER_NAME": "`serve` cannot tell a dead controller",
    "ray.serve._private.constants:SERVE_NAMESPACE": "`serve` and `stop` do not find the application",
    "ray.serve.context:_get_global_client": "gateways do not know their port, and `serve` deploys no files",
    "ray._private.worker:_global_node": "an idle application costs more CPU time",
    "ray.experimental.internal_kv:_internal_kv_put": "two schedulers may have one incarnation number",
    "ray.experimental.internal_kv:_internal_kv_list": "two schedulers may have one incarnation number",
    "ray.experimental.internal_kv:_internal_kv_get": "`deploy` cannot compare or restore configurations",
    "ray.serve._private.build_app:build_app": "`deploy` cannot tell what a change replaces",
    "ray.serve._private.config:DeploymentConfig.to_proto": "any change of a file replaces every engine",
}


@pytest.mark.parametrize(("name", "consequence"), RAY.items())
def test_the_used_interfaces_of_ray_exist(name: str, consequence: str) -> None:
    module, _, path = name.partition(":")
    found: object = importlib.import_module(module)
    for step in path.split("."):
        assert hasattr(found, step), f"without {name} {consequence}: see serve_app/serving/_ray.py"
        found = getattr(found, step)


@pytest.mark.parametrize("name", ["http_config", "get_serve_details", "deploy_apps"])
def test_the_used_interfaces_of_serves_client_exist(name: str) -> None:
    assert hasattr(ServeControllerClient, name), f"see serve_app/serving/_ray.py for {name}"


def test_a_deployment_still_holds_its_options_where_a_version_can_be_set() -> None:
    assert "_deployment_config" in Deployment.__init__.__code__.co_names


def test_private_interfaces_have_one_home_for_each_library() -> None:
    found = [
        f"{file}:{line} {name}"
        for path in sorted(ROOT.rglob("*.py"))
        if (file := str(path.relative_to(ROOT))) not in HOMES
        for line, name in private_uses(path.read_text(encoding="utf-8"))
    ]
    assert found == [], f"move these to one of {sorted(HOMES)}"


def private_uses(source: str) -> Iterator[tuple[int, str]]:
    """Yield private names imported from a library, and private attributes of objects other than `self`."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] in LIBRARIES:
            if any(part.startswith("_") for part in [*node.module.split("."), *(a.name for a in node.names)]):
                yield node.lineno, node.module
        elif isinstance(node, ast.Import):
            names = [alias.name for alias in node.names if alias.name.split(".")[0] in LIBRARIES]
            yield from ((node.lineno, name) for name in names if "._" in name)
        elif isinstance(node, ast.Attribute) and is_private(node.attr) and is_of_a_library(node.value):
            yield node.lineno, ast.unparse(node)
        elif isinstance(node, ast.keyword) and node.arg and is_private(node.arg):
            yield node.value.lineno, node.arg


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


def is_of_a_library(value: ast.expr) -> bool:
    """Exclude our own modules and objects, which ruff's SLF001 checks."""
    root = value
    while isinstance(root, ast.Attribute | ast.Call | ast.Subscript):
        root = root.func if isinstance(root, ast.Call) else root.value
    return isinstance(root, ast.Name) and root.id in {*LIBRARIES, "serve", "handle", "deployment", "parser"}
