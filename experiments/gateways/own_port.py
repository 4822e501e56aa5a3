"""The port of a gateway's own, at which HAProxy reaches it, and clients on the same machine could."""

import contextlib
import http.client
from pathlib import Path

from experiments.common.light_servers import role_beside_endpoints
from experiments.common.processes import process_tree
from experiments.overhead.client import KEY
from experiments.overhead.system import HOST
from serve_app.bench.connection import BenchError

# The state of a socket that listens, as /proc tells it.
_LISTENS = "0A"


def gateway_port(root: int) -> int:
    """The port that HAProxy reaches the gateway at: the only one on which it speaks HTTP."""
    (gateway,) = [one.pid for one in process_tree(root) if role_beside_endpoints(one) == "gateway"]
    for port in _listening(gateway):
        if _answers(port):
            return port
    raise BenchError("the gateway answers at no port of its own")


def _listening(pid: int) -> list[int]:
    sockets = set()
    for link in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(OSError):
            sockets.add(str(link.readlink()))
    found = []
    for name in ("tcp", "tcp6"):
        for line in Path(f"/proc/{pid}/net/{name}").read_text(encoding="ascii").splitlines()[1:]:
            fields = line.split()
            if fields[3] == _LISTENS and f"socket:[{fields[9]}]" in sockets:
                found.append(int(fields[1].rpartition(":")[2], 16))
    return found


def _answers(port: int) -> bool:

    connection = http.client.HTTPConnection(HOST, port, timeout=2.0)
    try:
        connection.request("GET", "/v1/models", headers={"authorization": f"Bearer {KEY}"})
        return connection.getresponse().status == http.client.OK
    except (OSError, http.client.HTTPException):
        return False
    finally:
        connection.close()
