import hashlib
import importlib.machinery
import importlib.util
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import ModuleType

import pytest

from serve_app.lab.workloads import _FILES, DOWNLOAD_FOLDER

SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "fetch_traces"
CONTENT = b"arrival_s,prompt_tokens,output_tokens\n0,1,1\n"


@pytest.fixture(scope="module")
def script() -> ModuleType:
    loader = importlib.machinery.SourceFileLoader("fetch_traces", str(SCRIPT))
    spec = importlib.util.spec_from_loader("fetch_traces", loader)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["fetch_traces"] = module
    loader.exec_module(module)
    return module


class Publisher(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        if self.path.startswith("/missing"):
            self.send_error(404)
            return
        broken = self.path.startswith("/broken")
        self.send_response(200)
        self.send_header("Content-Length", str(len(CONTENT) + (10 if broken else 0)))
        self.end_headers()
        self.wfile.write(CONTENT)

    def log_message(self, *_: object) -> None:
        """Suppress the log."""


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Publisher)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


def test_a_trace_is_downloaded_once(script: ModuleType, address: str, tmp_path: Path) -> None:
    checksum = hashlib.sha256(CONTENT).hexdigest()
    trace = script.PublicTrace(f"{address}/trace.csv", "CC-BY 4.0", len(CONTENT), checksum)
    assert "44 bytes" in script.ensure(trace, tmp_path, force=False)
    assert (tmp_path / "trace.csv").read_bytes() == CONTENT
    assert script.ensure(trace, tmp_path, force=False).endswith("exists")
    assert "44 bytes" in script.ensure(trace, tmp_path, force=True)


@pytest.mark.parametrize(
    ("place", "size", "checksum", "message"),
    [
        ("missing.csv", None, None, "returned 404"),
        ("broken.csv", None, None, "broke off after 44 of 54 bytes"),
        ("trace.csv", 45, None, "has 44 bytes, expected 45"),
        ("trace.csv", 44, "0" * 64, "has SHA-256"),
    ],
)
def test_an_incomplete_or_wrong_download_leaves_nothing_behind(
    script: ModuleType,
    address: str,
    tmp_path: Path,
    place: str,
    size: int | None,
    checksum: str | None,
    message: str,
) -> None:
    trace = script.PublicTrace(f"{address}/{place}", "CC-BY 4.0", size, checksum)
    with pytest.raises(script.FetchError, match=message):
        script.ensure(trace, tmp_path, force=False)
    assert list(tmp_path.iterdir()) == []


def test_without_network_the_message_has_the_remedy(script: ModuleType, tmp_path: Path) -> None:
    trace = script.PublicTrace("http://127.0.0.1:1/trace.csv", "CC-BY 4.0")
    with pytest.raises(script.FetchError, match="--traces-folder or EWSJF_TRACES"):
        script.ensure(trace, tmp_path, force=False)


def test_it_fetches_the_files_of_the_catalog(script: ModuleType) -> None:
    assert script.FOLDER == DOWNLOAD_FOLDER
    assert {name: script.TRACES[name].filename for name in script.DEFAULT} == _FILES
