"""Chart rendering with Helm."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml

from serve_app.settings.application import ApplicationSettings, settings_of

CHART = Path(__file__).resolve().parents[2] / "configs" / "helm"
EXAMPLES = {path.stem: path for path in sorted((CHART / "examples").glob("*.yaml"))}
ON_RAY = ("default", *(name for name in EXAMPLES if name != "servers_outside"))

Object = dict[str, Any]


def helm() -> Any:
    """Return Helm as a library; skip the test if it is not installed."""
    return pytest.importorskip("helm_python", reason="helm-python-sdk has wheels for Linux alone")


def values_of(example: str) -> dict[str, Any]:
    """Return the values of an example; `default` has none."""
    return {} if example == "default" else dict(yaml.safe_load(EXAMPLES[example].read_text()))


def install(values: Mapping[str, Any], name: str = "ewsjf") -> Mapping[str, Any]:
    """Return the result of `helm install --dry-run`, which validates values; objects are under `manifest`.

    Raises:
        HelmError: values that the chart rejects.
    """
    library = helm()
    # Nothing contacts a cluster, and there is none.
    with library.Config(
        namespace="llm", storage_driver="memory", kube_apiserver="http://127.0.0.1:9"
    ) as config:
        installed: Mapping[str, Any] = config.install(
            CHART, name, dict(values), namespace="llm", dry_run="client"
        )
    return installed


def render(values: Mapping[str, Any], name: str = "ewsjf") -> list[Object]:
    """Return the objects of an installation.

    Raises:
        HelmError: values that the chart rejects.
    """
    return [each for each in yaml.safe_load_all(install(values, name)["manifest"]) if each is not None]


def only(objects: list[Object], kind: str, ending: str = "") -> Object:
    """Return the only object of a kind whose name ends like this."""
    (found,) = (
        each for each in objects if each["kind"] == kind and each["metadata"]["name"].endswith(ending)
    )
    return found


def service_of(example: str) -> Object:
    """Return the RayService of an example."""
    return only(render(values_of(example)), "RayService")


def groups(service: Object) -> Iterator[Object]:
    """Yield the groups of the head and of the workers."""
    cluster = service["spec"]["rayClusterConfig"]
    yield cluster["headGroupSpec"]
    yield from cluster["workerGroupSpecs"]


def container(group: Object) -> Object:
    """Return the Ray container of a group's pods."""
    (found,) = group["template"]["spec"]["containers"]
    return dict(found)


def environment(group: Object) -> dict[str, str]:
    """Return the Ray container's environment."""
    return {entry["name"]: entry["value"] for entry in container(group)["env"]}


def application(service: Object) -> ApplicationSettings:
    """Return the settings that the service deploys."""
    (found,) = yaml.safe_load(service["spec"]["serveConfigV2"])["applications"]
    return settings_of(found["args"])
