"""What `ewsjf status` says of applications that do not serve, or not all that they should."""

import asyncio
import json
import os
import re
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from email.message import Message
from pathlib import Path
from typing import Any

import pytest

from serve_app.cli import application, main, status, templates
from serve_app.cli.command import program
from serve_app.cli.serve.instance import Instance
from serve_app.core import SchedulerSettings
from serve_app.serving.channel.settings import ChannelSettings
from serve_app.serving.gateway import ApiKey, Gateway, GatewaySettings, ServedModel
from serve_app.serving.scheduler.live_scheduler import LiveScheduler, LiveSchedulerOptions
from tests.cli.pages import answering
from tests.serving.gateway.builders import Answers, FakeDispatcher, serving

Change = Callable[[dict[str, Any]], object]


def scheduler() -> LiveScheduler:
    options = LiveSchedulerOptions(incarnation=1, channel=ChannelSettings())
    return LiveScheduler(SchedulerSettings(model="demo"), options)


async def healthy() -> dict[str, Any]:
    """Return the answers of an application that serves, by path."""
    found = scheduler()
    return {
        "/ready": {"status": "ready", "models_without_replica": []},
        "/debug/status": {"models": [found.status()]},
        "/debug/queue": {"models": [found.queue()]},
        "/debug/costs": {"models": []},
    }


@contextmanager
def running(change: Change | None = None) -> Iterator[str]:
    """Serve answers by path; `status:PATH` sets another status."""
    answers = asyncio.run(healthy())
    if change is not None:
        change(answers)

    def answer(_method: str, path: str, _headers: Message) -> tuple[int, object]:
        usual = 200 if path in answers else 404
        return answers.get(f"status:{path}", usual), answers.get(path, "not found")

    with answering(answer) as url:
        yield url


@pytest.fixture(autouse=True)
def nothing_else_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    runs(monkeypatch)


def runs(monkeypatch: pytest.MonkeyPatch, *instances: Instance) -> None:
    """Let these be the applications of this machine."""
    for module in (status, application):
        monkeypatch.setattr(module, "running_instances", lambda: iter(instances))


def instance(url: str, folder: Path, config: str = "a.yaml") -> Instance:
    return Instance(pid=1, started_at=0.0, url=url, config=config, folder=str(folder))


def has_no_replica(answers: dict[str, Any]) -> None:
    answers["/ready"] = {"status": "waiting", "models_without_replica": ["demo"]}
    answers["status:/ready"] = 503


def has_no_scheduler(answers: dict[str, Any]) -> None:
    has_no_replica(answers)
    answers["/ready"]["models_without_scheduler"] = ["demo"]
    for path in ("status", "queue", "costs"):
        answers[f"/debug/{path}"]["models"] = [{"model": "demo", "error": "its scheduler does not respond"}]


def is_stopping(answers: dict[str, Any]) -> None:
    answers["/ready"] = {"status": "stopping", "models_without_replica": []}
    answers["status:/ready"] = 503


def test_a_healthy_application_has_no_findings(capsys: pytest.CaptureFixture[str]) -> None:
    with running() as url:
        assert main(["status", "--url", f"{url}/v1"]) == 0
    assert capsys.readouterr().out.startswith(f"{url}: no problems found\n\ndemo\n")


def test_waiting_requests_are_counted_beside_no_findings(capsys: pytest.CaptureFixture[str]) -> None:
    def waits(answers: dict[str, Any]) -> None:
        answers["/debug/queue"]["models"][0].update(waiting=581)

    with running(waits) as url:
        assert main(["status", "--url", url]) == 0
    assert capsys.readouterr().out.startswith(f"{url}: no problems found; 581 requests are queued\n")


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (has_no_replica, "down: model demo has no replica, so its requests are rejected with 503"),
        (is_stopping, "down: the application is stopping"),
        (
            lambda answers: answers["/debug/status"].update(models=[{"model": "demo", "error": "gone"}]),
            "down: model demo: gone; new requests are queued until it is back",
        ),
    ],
)
def test_what_is_down_comes_first_and_sets_the_exit_status(
    change: Change, expected: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with running(change) as url:
        assert main(["status", "--url", url]) == 1
        finding, step, *_ = capsys.readouterr().out.splitlines()
        assert finding.startswith(expected)
        assert step.startswith("  next: ")
        assert main(["status", "--url", url, "--json"]) == 1
        first = json.loads(capsys.readouterr().out)["findings"][0]
    assert (f"{first['severity']}: {first['what']}", f"  next: {first['next_step']}") == (finding, step)


def test_while_a_scheduler_is_replaced_requests_are_said_to_queue_and_not_to_be_rejected(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with running(has_no_scheduler) as url:
        assert main(["status", "--url", url]) == 1
    shown = capsys.readouterr().out
    assert shown.startswith("down: model demo: no scheduler is connected; new requests are queued")
    assert shown.count("down: ") == 1
    assert "503" not in shown


def test_what_is_full_is_named_without_failing(capsys: pytest.CaptureFixture[str]) -> None:
    def is_full(answers: dict[str, Any]) -> None:
        answers["/debug/queue"]["models"][0].update(waiting=2_000, max_waiting=2_000)

    with running(is_full) as url:
        assert main(["status", "--url", url]) == 0
    assert capsys.readouterr().out.startswith(
        "degraded: model demo: 2,000 requests are queued, and the limit is 2,000, so requests are rejected"
    )


def test_without_a_key_it_still_says_which_model_has_no_replica(capsys: pytest.CaptureFixture[str]) -> None:
    def wants_a_key(answers: dict[str, Any]) -> None:
        has_no_replica(answers)
        answers["status:/debug/status"] = 401

    with running(wants_a_key) as url:
        assert main(["status", "--url", url]) == 2
    shown = capsys.readouterr()
    assert shown.out.startswith("down: model demo has no replica")
    assert "pass an admin key with --api-key" in shown.err


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (
            lambda answers: answers.update({"/ready": "hello"}),
            "is not a gateway of this project (/ready: 200)",
        ),
        (
            lambda answers: answers.update({"/ready": "no server", "status:/ready": 503}),
            "with 503, but no gateway behind it responds",
        ),
    ],
)
def test_what_is_no_gateway_is_named_with_the_remedy(
    change: Change, expected: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with running(change) as url:
        assert main(["status", "--url", url]) == 2
    assert expected in capsys.readouterr().err


def test_where_nothing_answers_the_applications_of_this_machine_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        silent = f"http://127.0.0.1:{taken.getsockname()[1]}"
    assert main(["status", "--url", silent]) == 2
    assert f"start it with {program()} serve CONFIG" in capsys.readouterr().err
    other = instance("http://127.0.0.1:7", tmp_path)
    runs(monkeypatch, other)
    assert main(["status", "--url", silent]) == 2
    assert "applications run here at http://127.0.0.1:7 (a.yaml)" in capsys.readouterr().err
    runs(monkeypatch, other, instance(silent, tmp_path))
    assert main(["status", "--url", silent]) == 2
    message = capsys.readouterr().err
    assert "the application of a.yaml is starting or stopping there" in message
    assert str(tmp_path) in message


def test_a_silent_program_on_the_port_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:

        def hang_up() -> None:
            other.accept()[0].close()

        thread = threading.Thread(target=hang_up)
        thread.start()
        assert main(["status", "--url", f"http://127.0.0.1:{other.getsockname()[1]}"]) == 2
        thread.join()
    # Parallel test runners may have renamed this process.
    assert re.search(rf"but its port is in use by \S.*\(process {os.getpid()}\)", capsys.readouterr().err)


def test_a_missing_replica_of_a_local_application_has_its_engines_last_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    logs = tmp_path / "ray/session_latest/logs"
    logs.mkdir(parents=True)
    (logs / "worker-1-01000000-1.err").write_text(
        ":actor_name:ServeReplica:ewsjf:short-demo\n"
        "(EngineCore_DP0 pid=7) ERROR 11-22 21:00:00 [core.py:1] ValueError: weights are missing\n"
    )
    with running(has_no_replica) as url:
        runs(monkeypatch, instance(url, tmp_path, str(templates.EMULATED)))
        assert main(["status", "--url", url]) == 1
    output = capsys.readouterr().out
    assert "first error of its engine: ValueError: weights are missing" in output
    assert str(tmp_path) in output


def test_the_one_application_of_this_machine_needs_no_url(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with running() as url:
        runs(monkeypatch, instance(url, tmp_path))
        assert main(["status"]) == 0
        assert capsys.readouterr().out.startswith(f"{url}: no problems found\n")
    runs(monkeypatch, *(instance(f"http://127.0.0.1:{port}", tmp_path) for port in (1, 2)))
    assert main(["status"]) == 2
    assert "choose one with --url: http://127.0.0.1:1 (a.yaml), http://127.0.0.1:2" in capsys.readouterr().err


async def test_a_real_gateway_and_scheduler_are_understood(capsys: pytest.CaptureFixture[str]) -> None:
    live = scheduler()

    async def shown() -> dict[str, Any]:
        return live.status()

    async def queued() -> dict[str, Any]:
        return live.queue()

    async def costed() -> dict[str, Any]:
        return {"model": "demo", "rows": []}

    dispatcher = FakeDispatcher([1])
    views = {"demo": Answers(queue=queued, status=shown, costs=costed)}
    settings = GatewaySettings(
        models=(ServedModel(name="demo"),), keys=(ApiKey(tenant="ops", key="k1", admin=True),)
    )
    async with serving(Gateway(settings, {"demo": dispatcher}, "gw", views)) as port:
        url = f"http://127.0.0.1:{port}"

        async def run_status() -> tuple[int, str]:
            found = await asyncio.to_thread(main, ["status", "--url", url, "--api-key", "k1"])
            return found, "".join(capsys.readouterr())

        found, output = await run_status()
        assert found == 0
        assert output.startswith(f"{url}: no problems found\n")
        live.stop("superseded")
        assert (await run_status())[1].startswith("degraded: model demo: its scheduler has ended: superseded")
        dispatcher.ports.clear()
        found, output = await run_status()
        assert found == 1
        assert output.startswith("down: model demo has no replica")
