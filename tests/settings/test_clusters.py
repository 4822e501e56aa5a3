"""Files for Ray's cluster launcher: they are valid, and start Ray with the right options."""

import re
import shlex
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml
from ray.autoscaler._private.util import prepare_config, validate_config
from ray.scripts.scripts import start as ray_start

from serve_app.cli.serve.instance import default_settings
from serve_app.settings.application import load_settings
from serve_app.settings.checking import check_file

ROOT = Path(__file__).resolve().parents[2]
AWS, ON_PREMISE = "cluster.yaml", "configs/clusters/on_premise.yaml"
CLUSTERS = (AWS, ON_PREMISE)
# Records its environment and arguments.
RAY = '#!/bin/sh\nenv -0 >environment\nprintf "%s\\n" "$@" >arguments\n'
# This machine's limit may be lower.
ULIMIT = 'ulimit() { printf "%s " "$@" >descriptors; }; '


def cluster(name: str) -> dict[str, Any]:
    return dict(yaml.safe_load((ROOT / name).read_text()))


def deployed(name: str) -> Path:
    """Return the configuration that the file deploys."""
    (path,) = re.findall(r"serve deploy (\S+\.yaml)", (ROOT / name).read_text())
    return ROOT / str(path)


def prepared(name: str) -> dict[str, Any]:
    """Return the file as the launcher completes and validates it."""
    content = prepare_config(cluster(name))
    validate_config(content)
    return dict(content)


@pytest.mark.parametrize("name", CLUSTERS)
def test_the_launcher_takes_the_file(name: str) -> None:
    content = prepared(name)
    assert content["provider"]["type"] == {AWS: "aws", ON_PREMISE: "local"}[name]
    assert content["head_node_type"] in content["available_node_types"]


def test_the_launcher_rejects_a_misspelt_key() -> None:
    with pytest.raises(Exception, match="setup_comands"):
        validate_config(prepare_config({**cluster(AWS), "setup_comands": []}))


def test_machines_of_your_own_are_all_workers() -> None:
    (node,) = prepared(ON_PREMISE)["available_node_types"].values()
    machines = len(cluster(ON_PREMISE)["provider"]["worker_ips"])
    assert (node["min_workers"], node["max_workers"]) == (machines, machines)


@pytest.mark.parametrize("name", CLUSTERS)
def test_the_deployed_configuration_passes_our_own_check(name: str) -> None:
    checked = check_file(deployed(name), on_this_machine=False, gpu="h100")
    assert checked.mistakes == []
    assert checked.settings is not None


@pytest.mark.parametrize("name", CLUSTERS)
def test_all_replicas_fit_the_gpus_that_there_are(name: str) -> None:
    content = cluster(name)
    if name == AWS:
        worker = content["available_node_types"]["gpu_worker"]
        gpus = worker["max_workers"] * worker["resources"]["GPU"]
    else:
        gpus = 8 * len(content["provider"]["worker_ips"])
    needed = sum(
        pool.resources.num_gpus * (pool.autoscaling.max_replicas if pool.autoscaling else pool.replicas or 1)
        for pool in load_settings(deployed(name)).models[0].pools
    )
    assert needed <= gpus


@pytest.mark.parametrize("kind", ["head", "worker"])
@pytest.mark.parametrize("name", CLUSTERS)
def test_ray_starts_with_our_settings_the_keys_and_many_files(name: str, kind: str, tmp_path: Path) -> None:
    checkout = tmp_path / "ewsjf-serve"
    for path, text in {
        "serve_app/cli/serve/serve.env": (ROOT / "serve_app/cli/serve/serve.env").read_text(),
        "keys.env": "EWSJF_API_KEY_APP=secret\nEWSJF_API_KEY_NIGHTLY=other\n",
        ".venv/bin/ray": RAY,
    }.items():
        (checkout / path).parent.mkdir(parents=True, exist_ok=True)
        (checkout / path).write_text(text)
    (checkout / ".venv/bin/ray").chmod(0o755)
    given = {"PATH": "/usr/bin:/bin", "HOME": str(tmp_path), "RAY_HEAD_IP": "10.0.0.10"}
    for command in cluster(name)[f"{kind}_start_ray_commands"]:
        subprocess.run(["bash", "-c", ULIMIT + command], cwd=tmp_path, env=given, check=True, timeout=60)
    found = dict(line.split("=", 1) for line in (checkout / "environment").read_text().split("\0") if line)
    assert default_settings().items() <= found.items()
    required = {key.env for key in load_settings(deployed(name)).gateway.keys if key.env is not None}
    assert required <= found.keys()
    assert (checkout / "descriptors").read_text() == "-n 65536 "
    word, *arguments = (checkout / "arguments").read_text().splitlines()
    assert word == "start"
    # Ray's own parser rejects unknown options.
    options = ray_start.make_context("start", arguments).params
    assert options["head"] == (kind == "head")
    if kind == "worker":
        assert options["address"] == "10.0.0.10:6379"
    else:
        assert options["port"] == 6379
        # The launcher writes it there, and Ray expands the tilde.
        assert options["autoscaling_config"] == "~/ray_bootstrap_config.yaml"


@pytest.mark.parametrize("name", CLUSTERS)
def test_the_checkout_is_where_the_commands_expect_it(name: str) -> None:
    content = cluster(name)
    ((target, source),) = content["file_mounts"].items()
    assert source == "."
    assert Path(target) == Path("/home") / content["auth"]["ssh_user"] / "ewsjf-serve"
    assert "keys.env" not in content["rsync_exclude"]
    assert "rsync_filter" not in content, "it would leave out keys.env, which Git ignores"
    for command in content["setup_commands"]:
        assert shlex.split(command)[:2] == ["cd", "ewsjf-serve"]
