"""What the chart makes of values, by Helm itself."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml

from serve_app.settings.application import AppSettings
from serve_app.settings.loading import settings_of

CHART = Path(__file__).resolve().parents[2] / "configs" / "helm"
EXAMPLES = {path.stem: path for path in sorted((CHART / "examples").glob("*.yaml"))}

Object = dict[str, Any]


def helm() -> Any:
    """Helm as a library; the test that asks for it is skipped where there is none."""
    return pytest.importorskip("helm_python", reason="helm-python-sdk has wheels for Linux alone")


def values_of(example: str) -> dict[str, Any]:
    """The values of an example; of `default` none."""
    return {} if example == "default" else dict(yaml.safe_load(EXAMPLES[example].read_text()))


def install(values: Mapping[str, Any], name: str = "ewsjf") -> Mapping[str, Any]:
    """What `helm install --dry-run` says, with the objects under `manifest`; values are validated, too.

    Raises:
        HelmError: values that the chart rejects.
    """
    library = helm()
    # Nothing is asked of a cluster, and none is there.
    with library.Config(
        namespace="llm", storage_driver="memory", kube_apiserver="http://127.0.0.1:9"
    ) as config:
        said: Mapping[str, Any] = config.install(CHART, name, dict(values), namespace="llm", dry_run="client")
    return said


def render(values: Mapping[str, Any], name: str = "ewsjf") -> list[Object]:
    """The objects that an installation makes.

    Raises:
        HelmError: values that the chart rejects.
    """
    return [each for each in yaml.safe_load_all(install(values, name)["manifest"]) if each is not None]


def only(objects: list[Object], kind: str, ending: str = "") -> Object:
    """The one object of a kind whose name ends so."""
    (found,) = (
        each for each in objects if each["kind"] == kind and each["metadata"]["name"].endswith(ending)
    )
    return found


def groups(service: Object) -> Iterator[Object]:
    """The head's group and those of workers."""
    cluster = service["spec"]["rayClusterConfig"]
    yield cluster["headGroupSpec"]
    yield from cluster["workerGroupSpecs"]


def container(group: Object) -> Object:
    """The Ray container of a group's pods."""
    (found,) = group["template"]["spec"]["containers"]
    return dict(found)


def environment(group: Object) -> dict[str, str]:
    """What the Ray container finds in its environment."""
    return {entry["name"]: entry["value"] for entry in container(group)["env"]}


def application(service: Object) -> AppSettings:
    """The settings that the service deploys."""
    (found,) = yaml.safe_load(service["spec"]["serveConfigV2"])["applications"]
    return settings_of(found["args"])
