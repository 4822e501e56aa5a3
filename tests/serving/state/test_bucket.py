"""The bucket that tests write to: it is there, whoever else listens on this machine."""

import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest
import s3fs

from experiments.common.application import free_ports
from tests.serving.state import bucket
from tests.serving.state.bucket import reached_by_this_process, served_bucket


def test_a_bucket_is_served_beside_a_program_that_took_its_port(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    free = free_ports()
    with HTTPServer(("127.0.0.1", 0), BaseHTTPRequestHandler) as other:
        threading.Thread(target=other.serve_forever, daemon=True).start()
        ports = (other.server_port if place == bucket._APART else next(free) for place in range(1_000))
        monkeypatch.setattr(bucket, "free_ports", lambda: ports)
        with served_bucket(tmp_path) as served, reached_by_this_process(served) as uri:
            system = s3fs.S3FileSystem(skip_instance_cache=True)
            system.pipe_file(f"{uri}/x", b"kept")
            assert system.cat_file(f"{uri}/x") == b"kept"
        other.shutdown()
