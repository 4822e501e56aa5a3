"""Light endpoints in one process of their own (`light_endpoint`), opened and closed by port."""

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from experiments.common.processes import ProcessUse, role_of

_ROOT = Path(__file__).resolve().parents[2]


@dataclass
class LightServers:
    """The process of the endpoints."""

    process: "subprocess.Popen[str]"

    def tell(self, verb: str, *values: float) -> None:
        """Say a line of `light_endpoint`, such as `open PORT`, and wait until that is done."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(f"{' '.join(map(str, (verb, *values)))}\n")
        self.process.stdin.flush()
        self.process.stdout.readline()


@contextmanager
def started_light_servers() -> Iterator[LightServers]:
    """The process without endpoints yet; it ends with the block."""
    with subprocess.Popen(
        [sys.executable, "-m", "experiments.common.light_endpoint"],
        cwd=_ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        try:
            yield LightServers(process)
        finally:
            process.terminate()


def role_beside_endpoints(process: ProcessUse) -> str:
    """As `role_of`, of an application without engines: the replica of a pool is its `watcher`."""
    role = role_of(process)
    return "watcher" if role == "engine" else role
