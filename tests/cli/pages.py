"""Application as commands see it: a server in a thread with fixed pages."""

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from email.message import Message
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

Answer = Callable[[str, str, Message], tuple[int, object]]
"""Status and content by method, path and headers; content other than text is sent as JSON."""


@contextmanager
def answering(answer: Answer) -> Iterator[str]:
    """Serve these answers; yield the URL."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            status, content = answer(self.command, self.path, self.headers)
            body = (content if isinstance(content, str) else json.dumps(content)).encode()
            self.send_response_only(status)
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def do_POST(self) -> None:
            self.do_GET()

        def log_message(self, *_: object) -> None:
            """Keep the log out of the test's output."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
