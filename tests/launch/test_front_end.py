"""HAProxy's own ports."""

import subprocess
from pathlib import Path

import pytest

from serve_app.launch.front_end import METRICS_VARIABLE, PATH_VARIABLE, STATS_VARIABLE, haproxy_command

PORTS = {STATS_VARIABLE: "8404", METRICS_VARIABLE: "9101"}
CONFIG = """\
frontend prometheus
    bind :9101
frontend http_frontend
    bind 127.0.0.1:8000
listen stats
  bind *:8404
"""


def written(tmp_path: Path, host: str) -> str:
    """What HAProxy would read."""
    found = haproxy_command(tmp_path / "haproxy", host, PORTS)
    config = tmp_path / "haproxy.cfg"
    config.write_text(CONFIG)
    # It says its version and ends: the ports are not opened.
    said = subprocess.run(
        [found[PATH_VARIABLE], "-v", "-f", str(config)], check=True, capture_output=True, text=True
    )
    assert "HAProxy" in said.stdout
    return config.read_text()


def test_what_listens_on_this_machine_alone_keeps_its_statistics_there(tmp_path: Path) -> None:
    expected = CONFIG.replace("*:8404", "127.0.0.1:8404").replace(" :9101", " 127.0.0.1:9101")
    assert written(tmp_path, "127.0.0.1") == expected
    # HAProxy starts anew whenever gateways come or go.
    assert written(tmp_path, "127.0.0.1") == expected


def test_where_others_are_let_in_prometheus_is_and_nobody_sees_the_statistics(tmp_path: Path) -> None:
    assert written(tmp_path, "0.0.0.0") == CONFIG.replace("*:8404", "127.0.0.1:8404")


def test_an_executable_that_somebody_has_named_stays(tmp_path: Path) -> None:
    assert haproxy_command(tmp_path, "127.0.0.1", {**PORTS, PATH_VARIABLE: "/opt/haproxy"}) == {}


def test_without_haproxy_nothing_is_set(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("serve_app.launch.front_end._haproxy", lambda: None)
    assert haproxy_command(tmp_path, "127.0.0.1", PORTS) == {}
