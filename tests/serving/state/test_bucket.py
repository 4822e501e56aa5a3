"""The bucket that tests write to: it is there, whoever else listens on this machine."""

import threading
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
import s3fs

from tests.serving.state import bucket
from tests.serving.state.bucket import reached_by_this_process, served_bucket


class Rejects(BaseHTTPRequestHandler):
    """Knows no method at all."""


class SaysNothing(BaseHTTPRequestHandler):
    """Takes a request, and leaves its client waiting."""

    def handle(self) -> None:
        while self.rfile.read(1):
            pass


class TakesAnything(BaseHTTPRequestHandler):
    """Takes what is put, and says so in no words of S3; whatever is fetched is something else."""

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


class TakesAnythingSilently(TakesAnything):
    """The same, and its answers are empty like those of S3."""

    body = b""


@pytest.mark.parametrize("stranger", [Rejects, SaysNothing, TakesAnything, TakesAnythingSilently])
def test_a_bucket_is_served_beside_a_program_that_took_its_port(
    stranger: type[BaseHTTPRequestHandler], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with ThreadingHTTPServer(("127.0.0.1", 0), stranger) as other:
        threading.Thread(target=other.serve_forever, daemon=True).start()
        taken = iter([other.server_port])
        drawn = bucket.drawn_port
        monkeypatch.setattr(bucket, "drawn_port", lambda: next(taken, None) or drawn())
        with served_bucket(tmp_path) as served, reached_by_this_process(served) as uri:
            system = s3fs.S3FileSystem(skip_instance_cache=True)
            system.pipe_file(f"{uri}/x", b"kept")
            assert system.cat_file(f"{uri}/x") == b"kept"
        assert not list(taken), "the port of the stranger was never asked for"
        other.shutdown()
