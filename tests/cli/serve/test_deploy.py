"""`ewsjf deploy` as a user runs it: a change under requests, one that fails, and the stop afterwards."""

import asyncio
import contextlib
import http.server
import json
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, ClassVar
from unittest.mock import Mock

import aiohttp
import httpx
import pytest
import yaml

from experiments.common.application import free_port
from experiments.common.processes import titled
from serve_app.cli import main
from serve_app.cli.deploy import _Deployment
from serve_app.cli.serve import cluster
from serve_app.cli.serve.changes import (
    CHANGED,
    REPLACED,
    STARTED,
    STOPPED,
    UNCHANGED,
    change,
    differences,
    effects,
)
from serve_app.cli.serve.cluster import Cluster, build
from serve_app.cli.serve.command import local_url
from serve_app.cli.serve.instance import instance_folder
from serve_app.cli.serve.processes import HostJob
from serve_app.errors import ServeAppError
from serve_app.serving._ray import deployments_of
from serve_app.serving.access import read_admin_key
from serve_app.settings.application import IMPORT_PATH
from serve_app.settings.checking import check_file
from tests.cli.serve.application import ROOT, Terminal, configuration, terminal
from tests.cli.serve.test_serve import END_S, LONG, stream
from tests.engines.servers import serving
from tests.serving.remote.servers import VllmLike
from tests.serving.test_hot import ARGS, built

pytestmark = pytest.mark.timeout(400)
# No process listens there.
NOWHERE = "http://127.0.0.1:9"
# Names of the model in configs/local.yaml.
NAMES = ("demo", "gpt-4o-mini")


def remote(url: str) -> dict[str, Any]:
    """Return the settings of a pool with one remote server."""
    return {"name": "long", "engine": {"remote": {"endpoints": [url], "advanced": {"start_timeout_s": 1.0}}}}


class OneAnswer(http.server.BaseHTTPRequestHandler):
    """Server that lists its model once, and then fails."""

    has_listed: ClassVar[bool] = False

    def do_GET(self) -> None:
        lists = self.path == "/v1/models" and not OneAnswer.has_listed
        OneAnswer.has_listed |= lists
        body = json.dumps({"data": [{"id": name, "max_model_len": 8192} for name in NAMES]}).encode()
        self.send_response(200 if lists else 404)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        """Print nothing."""


@contextlib.contextmanager
def failing_server() -> Iterator[str]:
    """Run a server that fails once it has been identified; yield its address."""
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), OneAnswer) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_address[1]}"
        server.shutdown()


def changed_file(path: Path, change: Callable[[dict[str, Any]], None]) -> None:
    """Edit the arguments of the application in a file."""
    content = yaml.safe_load(path.read_text())
    change(content["applications"][0]["args"])
    path.write_text(yaml.safe_dump(content))


def deploy(path: Path, *more: str) -> subprocess.CompletedProcess[str]:
    # As in a new terminal: another folder, and without the application's environment.
    return subprocess.run(
        [sys.executable, "-m", "serve_app", "deploy", str(path), *more],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )


def replicas(pid: int) -> dict[str, set[int]]:
    """Return the processes of each deployment."""
    found: dict[str, set[int]] = {}
    for process, title in titled(pid, "ray::ServeReplica:"):
        # While a method runs, its name follows that of the deployment.
        deployment = title.split()[0].partition(":")[2].partition(".")[0]
        found.setdefault(deployment, set()).add(process.pid)
    return found


async def ends_beside(url: str, work: Callable[[], Any]) -> tuple[Counter[int], Any]:
    """Send requests while `work` runs; return their statuses, and its result."""
    working = asyncio.create_task(asyncio.to_thread(work))
    body = {"model": "demo", "prompt": "Hi", "max_tokens": 8}
    statuses: Counter[int] = Counter()
    async with httpx.AsyncClient(timeout=60) as http:
        while not working.done():
            # A full load would take most of the CPU time of this test, and show no more.
            await asyncio.sleep(0.1)
            answers = [http.post(f"{url}/v1/completions", json=body) for _ in range(4)]
            statuses.update([answer.status_code for answer in await asyncio.gather(*answers)])
    return statuses, await working


@pytest.mark.application
async def test_a_change_is_applied_one_that_fails_is_rolled_back_and_a_stop_completes_answers(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """One application for the whole life, because each start takes some 25 s of CPU time."""
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    config = configuration(tmp_path, port, drain_s=5.0)
    # It never starts, so that the processes change by deployments only.
    changed_file(config, lambda args: args["models"][0].update(tuner={"advanced": {"learn_from": 1_000_000}}))
    with terminal(config) as opened:
        await asyncio.to_thread(opened.wait_for, "stop ")
        before = replicas(opened.process.pid)
        assert before.keys() == {"scheduler-demo", "short-demo", "long-demo", "gateway"}
        # The port belongs to the application that the file is for.
        assert check_file(config, own_ports={port}).mistakes == []
        assert main(["check", str(config)]) == 0
        assert f"deploy {config}" in capsys.readouterr().out
        assert [found.message for found in check_file(config).mistakes if "in use" in found.message]

        changed_file(config, lambda args: args["models"][0].update(scheduler={"max_waiting": 77}))
        changed_file(config, lambda args: args["gateways"].update(drain_timeout_s=120.0))
        statuses, done = await ends_beside(url, lambda: deploy(config))
        assert done.returncode == 0, done.stderr
        for setting in ("gateways.drain_timeout_s", "models[0].scheduler.max_waiting"):
            assert setting in done.stdout.splitlines()[0]
        assert f"scheduler-demo  {CHANGED}" in done.stdout
        assert f"gateway         {CHANGED}" in done.stdout
        assert "unchanged: long-demo, short-demo" in done.stdout
        assert set(statuses) == {200}
        assert replicas(opened.process.pid) == before
        (queue,) = (await queues(url))["models"]
        assert queue["max_waiting"] == 77

        working = config.read_text()
        changed_file(config, lambda args: args["models"][0]["pools"].__setitem__(1, remote(NOWHERE)))
        done = await asyncio.to_thread(deploy, config)
        assert done.returncode == 2
        assert (
            "nothing was changed, because no endpoint of pool long of model demo can be used" in done.stderr
        )
        assert f"{NOWHERE}/v1/models gave no answer: Connection refused" in done.stderr
        assert replicas(opened.process.pid) == before

        with failing_server() as server:
            config.write_text(working)
            changed_file(config, lambda args: args["models"][0]["pools"].__setitem__(1, remote(server)))
            statuses, done = await ends_beside(url, lambda: deploy(config))
        assert done.returncode == 1
        assert f"long-demo       {REPLACED}" in done.stdout
        assert "The change failed: long-demo did not start: no endpoint can be used" in done.stderr
        assert "Restored after" in done.stderr
        assert set(statuses) == {200}
        after = replicas(opened.process.pid)
        assert after.keys() == before.keys()
        # The gateway starts anew, because it is bound to the watchers.
        assert {**after, "gateway": before["gateway"]} == before
        (queue,) = (await queues(url))["models"]
        assert queue["max_waiting"] == 77

        config.write_text(working)
        missing = str(tmp_path / "missing")
        changed_file(config, lambda args: args.update(gateway={"keys": [{"tenant": "a", "file": missing}]}))
        statuses, done = await ends_beside(url, lambda: deploy(config))
        assert done.returncode == 1
        reason = f"the key of tenant a cannot be read from {missing}: No such file or directory"
        assert f"The change failed: gateways rejected the settings: {reason}" in done.stderr
        assert "Restored after" in done.stderr
        assert set(statuses) == {200}
        assert replicas(opened.process.pid) == after

        other = tmp_path / "other.yaml"
        other.write_text(working.replace("name: demo", "name: another").replace("gpt-4o-mini", "another-4o"))
        statuses, done = await ends_beside(url, lambda: deploy(other, "--url", url))
        assert done.returncode == 2
        assert f"{other} has none of the models that run at {url} (demo, gpt-4o-mini)" in done.stderr
        assert "pass --replace to stop them and serve another, another-4o instead" in done.stderr
        assert set(statuses) == {200}
        assert replicas(opened.process.pid).keys() == before.keys()

        config.write_text(working)
        done = await asyncio.to_thread(deploy, config)
        assert "changed settings: none" in done.stdout
        await new_requests_are_rejected_while_an_answer_is_completed(url, opened)
        # The stop follows the deployed settings.
        assert "In-flight requests have 120 s to complete" in opened.output
        assert opened.ended(END_S) == 0


@pytest.mark.application
async def test_endpoints_that_an_admin_added_or_removed_stay_so_after_a_deployment(tmp_path: Path) -> None:
    first, second = VllmLike(), VllmLike()
    first.models = second.models = {"data": [{"id": name, "max_model_len": 8192} for name in NAMES]}
    port = free_port()
    async with serving(first) as named, serving(second) as added:
        config = configuration(tmp_path, port, drain_s=1.0, pools=[remote(named)])
        changed_file(config, lambda args: args["models"][0].pop("scheduler"))
        with terminal(config) as opened:
            await asyncio.to_thread(opened.wait_for, "stop ")
            key = read_admin_key(instance_folder(port))
            async with httpx.AsyncClient(
                base_url=f"http://127.0.0.1:{port}", headers={"authorization": f"Bearer {key}"}, timeout=30
            ) as http:
                for method, url in (("POST", added), ("DELETE", named)):
                    answer = await http.request(method, "/admin/endpoints", json={"url": url})
                    # A restart would lose it, because there is no `state_uri`.
                    assert answer.json() == {"model": "demo", "pool": "long", "url": url, "persisted": False}

                changed = remote(named)
                changed["engine"]["remote"]["advanced"]["refresh_s"] = 6.0
                changed_file(config, lambda args: args["models"][0].update(pools=[changed]))
                done = await asyncio.to_thread(deploy, config)
                assert done.returncode == 0, done.stderr
                assert f"long-demo  {REPLACED}" in done.stdout
                listed = (await http.get("/admin/endpoints")).json()["endpoints"]
                assert {each["url"]: each["state"] == "removed" for each in listed} == {
                    added: False,
                    named: True,
                }
            opened.type_interrupt()
            assert opened.ended(END_S) == 0


async def new_requests_are_rejected_while_an_answer_is_completed(url: str, opened: Terminal) -> None:
    async with aiohttp.ClientSession() as session:
        answer = asyncio.create_task(stream(session, url))
        await asyncio.sleep(1.0)
        opened.type_interrupt()
        new: Counter[str] = Counter()
        while not answer.done():
            async with session.post(f"{url}/v1/chat/completions", json={**LONG, "max_tokens": 1}) as asked:
                new[f"{asked.status}" if asked.status != 503 else asked.headers["retry-after"]] += 1
            if asked.status == 503:
                # Load balancers must choose another gateway.
                async with session.get(f"{url}/-/healthz") as health:
                    assert health.status == 503
            opened.read()
            await asyncio.sleep(0.2)
        assert answer.result() == "complete"
        # The application notices an interrupt within a second.
        assert new.pop("200", 0) <= 5, new
        assert new


async def queues(url: str) -> Any:
    """Return the application's own view of its queues."""
    key = read_admin_key(instance_folder(int(url.rpartition(":")[2])))
    async with httpx.AsyncClient() as http:
        answer = await http.get(f"{url}/debug/queue", headers={"authorization": f"Bearer {key}"})
    return answer.json()


def test_deployments_that_come_and_go_are_named() -> None:
    fewer = {**ARGS, "models": [{**ARGS["models"][0], "pools": ARGS["models"][0]["pools"][:1]}]}
    whole, part = built(ARGS), built(fewer)
    assert effects(whole, part)["long-demo"] == STOPPED
    assert effects(part, whole)["long-demo"] == STARTED
    assert set(effects(whole, built(ARGS)).values()) == {UNCHANGED}


@pytest.mark.parametrize(
    ("before", "after", "paths"),
    [
        ({"a": 1}, {"a": 1}, []),
        ({"a": {"b": 1, "c": 2}}, {"a": {"b": 3, "d": None}}, ["a.b", "a.c", "a.d"]),
        ({"a": [{"b": 1}, {"b": 2}]}, {"a": [{"b": 1}, {"b": 3}]}, ["a[1].b"]),
        ({"a": [1]}, {"a": [1, 2]}, ["a"]),
        ({"a": "secret"}, {"a": None}, ["a"]),
    ],
)
def test_settings_that_differ_are_named_without_values(before: Any, after: Any, paths: list[str]) -> None:
    assert list(differences(before, after)) == paths


def test_the_application_is_found_behind_another_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ours = {"name": "ours", "route_prefix": "/llm", "import_path": IMPORT_PATH, "args": ARGS}
    other = {"name": "other", "route_prefix": "/other", "import_path": "other:app"}
    content = {"applications": [other, ours]}
    application = build(content)
    assert deployments_of(application).keys() == built(ARGS).keys()
    assert local_url(content) == "http://127.0.0.1:8000/llm"
    changed = {"applications": [other | {"name": "x"}, ours | {"args": {**ARGS, "state_uri": "/state"}}]}
    assert change(content, application, changed, application).settings == ("state_uri",)
    monkeypatch.setattr(cluster, "connect", lambda _: {"other": None})
    with pytest.raises(ServeAppError, match="no application 'ours' runs at auto"):
        Cluster(HostJob(config="c", folder=str(tmp_path), url=""), content).connect_to("auto")


def test_gateways_of_a_previous_release_cause_a_warning(capsys: pytest.CaptureFixture[str]) -> None:
    config = ROOT / "configs/local.yaml"
    previous = Mock(rejected_settings=Mock(side_effect=AttributeError("rejected_settings")))
    _Deployment(config, check_file(config, on_this_machine=False), None, "auto", None)._check_gateways(
        previous
    )
    assert "warning: gateways do not report" in capsys.readouterr().err


def test_without_a_running_application_there_is_nothing_to_change(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    assert main(["deploy", str(ROOT / "configs/local.yaml")]) == 2
    assert "no application of this user runs on this machine" in capsys.readouterr().err
