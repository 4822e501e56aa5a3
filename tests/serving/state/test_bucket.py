"""Test bucket beside other programs that listen on the same ports."""

import threading
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
import s3fs

from tests.serving.state import bucket
from tests.serving.state.bucket import reached_by_this_process, served_bucket


class Rejects(BaseHTTPRequestHandler):
    """Server without methods."""


class SendsNothing(BaseHTTPRequestHandler):
    """Server that reads requests and never answers."""

    def handle(self) -> None:
        while self.rfile.read(1):
            pass


class AcceptsAnything(BaseHTTPRequestHandler):
    """Server that accepts every upload with a status unknown to S3, and returns other content."""

    protocol_version = "HTTP/1.1"
    body = b'{"name": "first", "size": 1}'

    def do_PUT(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        self._answer(HTTPStatus.CREATED)

    def do_GET(self) -> None:
        self._answer(HTTPStatus.OK)

    def _answer(self, status: HTTPStatus) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(self.body)))
        self.end_headers()
        self.wfile.write(self.body)


class AcceptsAnythingSilently(AcceptsAnything):
    """The same with empty bodies, as in S3."""

    body = b""


@pytest.mark.application
@pytest.mark.parametrize("server", [Rejects, SendsNothing, AcceptsAnything, AcceptsAnythingSilently])
def test_a_bucket_is_served_beside_a_program_that_took_its_port(
    server: type[BaseHTTPRequestHandler], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with ThreadingHTTPServer(("127.0.0.1", 0), server) as other:
        threading.Thread(target=other.serve_forever, daemon=True).start()
        taken = iter([other.server_port])
        drawn = bucket.drawn_port
        monkeypatch.setattr(bucket, "drawn_port", lambda: next(taken, None) or drawn())
        with served_bucket(tmp_path) as served, reached_by_this_process(served) as uri:
            system = s3fs.S3FileSystem(skip_instance_cache=True)
            system.pipe_file(f"{uri}/x", b"kept")
            assert system.cat_file(f"{uri}/x") == b"kept"
        assert not list(taken), "the port of the other server was never used"
        other.shutdown()
