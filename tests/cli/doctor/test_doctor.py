"""The command `doctor` against applications with one fault each, simulated over HTTP."""

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

from serve_app.cli import application, main
from serve_app.cli import doctor as command
from serve_app.cli.command import program
from serve_app.cli.init.document import PACKAGED_CONFIG
from serve_app.cli.serve.instance import Instance
from serve_app.core import SchedulerSettings
from serve_app.errors import Outcome
from serve_app.serving.channel.settings import ChannelSettings
from serve_app.serving.gateway import ApiKey, Gateway, GatewaySettings, ServedModel
from serve_app.serving.scheduler.decision_log import DecisionLogSettings
from serve_app.serving.scheduler.live_scheduler import LiveScheduler, LiveSchedulerOptions
from serve_app.serving.state import StatePersister, StateStore
from tests.cli.pages import answering
from tests.serving.gateway.builders import Answers, FakeDispatcher, serving

REPORT = {"received": 1, "running": 1, "waiting": 0, "kv_usage_ratio": 0.1, "tpot_s": 0.01, "draining": False}
REPLICA = {"pool": "short", "max_num_seqs": 16, "in_flight": 1, "stale": False, "report": REPORT}
HEALTHY: dict[str, Any] = {
    "/health": {"status": "ok"},
    "/ready": {"status": "ready", "models_without_replica": []},
    "/debug/status": {
        "models": [
            {
                "model": "demo",
                "ended": "",
                "waiting": {"interactive": 0, "default": 0},
                "replicas": {"s1": REPLICA, "s2": REPLICA},
                "tuner": {"mode": "off", "frozen": ""},
                "decision_log_ended": "",
            }
        ]
    },
    "/debug/queue": {
        "models": [
            {
                "model": "demo",
                "waiting": 0,
                "max_waiting": 2000,
                "queue_timeout_s": {"interactive": 60.0, "default": 300.0, "batch": 43200.0},
                "sub_queues": [],
            }
        ]
    },
    "/metrics": 'ewsjf_requests_concluded_total{model="demo",class="default",outcome="completed"} 100\n',
}
Change = Callable[[dict[str, Any]], object]


@contextmanager
def running(change: Change | None = None) -> Iterator[str]:
    """Serve answers by path; `status:PATH` sets another status."""
    # A copy through JSON, so that replicas share nothing.
    answers = json.loads(json.dumps(HEALTHY))
    if change is not None:
        change(answers)

    def answer(_method: str, path: str, _headers: Message) -> tuple[int, object]:
        usual = 200 if path in answers else 404
        return answers.get(f"status:{path}", usual), answers.get(path, "not found")

    with answering(answer, answers.get("skew_s", 0.0)) as url:
        yield url


@pytest.fixture(autouse=True)
def nothing_else_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command, "running_instances", lambda: iter(()))


def model(answers: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = answers["/debug/status"]["models"][0]
    return found


def queue(answers: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = answers["/debug/queue"]["models"][0]
    return found


def has_no_replica(answers: dict[str, Any]) -> None:
    answers["/ready"] = {"status": "waiting", "models_without_replica": ["demo"]}
    answers["status:/ready"] = 503


def is_stopping(answers: dict[str, Any]) -> None:
    answers["/ready"] = {"status": "stopping", "models_without_replica": []}
    answers["status:/ready"] = 503


def has_a_stale_report(answers: dict[str, Any]) -> None:
    model(answers)["replicas"]["s2"]["stale"] = True


def has_a_dead_endpoint(answers: dict[str, Any]) -> None:
    down = {"url": "http://b:1", "replica": "b", "reason": "not identified yet", "since": 1_700_000_000}
    model(answers)["endpoints"] = [{"pool": "short", "endpoints": 2, "down": [down]}]


def has_an_unread_source(answers: dict[str, Any]) -> None:
    reason = "namespace prod has no InferencePool chatt (existing: chat, code)"
    unread = {"source": "inferencepool+http://chatt.prod", "reason": reason}
    model(answers)["endpoints"] = [
        {"pool": "short", "endpoints": 0, "down": [], "unread_sources": [unread]},
        {"pool": "of an older release", "endpoints": 0, "down": []},
    ]


def has_no_report_at_all(answers: dict[str, Any]) -> None:
    for replica in model(answers)["replicas"].values():
        replica["report"] = None


def wants_a_key(answers: dict[str, Any]) -> None:
    answers["status:/debug/status"] = answers["status:/debug/queue"] = 401


def has_a_long_wait(answers: dict[str, Any]) -> None:
    for wait_s in (2.0, 45.0):
        queue(answers)["sub_queues"].append(
            {"priority": "interactive", "wait_s": wait_s, "reason": "short: no capacity"}
        )


def is_saturated(answers: dict[str, Any]) -> None:
    model(answers)["waiting"]["default"] = 7
    model(answers)["replicas"]["s1"]["report"]["waiting"] = 3
    model(answers)["replicas"]["s2"]["report"]["running"] = 16


def speaks_otherwise(answers: dict[str, Any]) -> None:
    del model(answers)["replicas"]


def counts(sample: str, value: int) -> Change:
    def change(answers: dict[str, Any]) -> None:
        name, _, labels = sample.partition(" ")
        answers["/metrics"] += f'{name}{{model="demo"{"," if labels else ""}{labels}}} {value}\n'

    return change


def concluded(outcome: Outcome, value: int) -> Change:
    return counts(f'ewsjf_requests_concluded_total class="default",outcome="{outcome}"', value)


def put_back(answers: dict[str, Any]) -> None:
    counts('ewsjf_dispatches_total pool="short"', 100)(answers)
    counts('ewsjf_put_backs_total failure="lost"', 5)(answers)
    counts('ewsjf_put_backs_total failure="revoked"', 61)(answers)


FINDINGS: dict[str, tuple[Change, str]] = {
    "no replica": (has_no_replica, "down: model demo has no replica"),
    "stopping": (is_stopping, "down: the application is stopping"),
    "no scheduler": (
        lambda answers: model(answers).update(error="its scheduler does not respond: gone"),
        "down: model demo: its scheduler does not respond",
    ),
    "scheduler ended": (
        lambda answers: model(answers).update(ended="superseded"),
        "degraded: model demo: its scheduler has ended: superseded",
    ),
    "empty pool": (
        lambda answers: model(answers).update(pools=["short", "long"]),
        "degraded: model demo: pool long has no replica",
    ),
    "dead endpoint": (
        has_a_dead_endpoint,
        "degraded: model demo: 1 of 2 endpoints of pool short down: http://b:1: not identified yet",
    ),
    "unread source": (
        has_an_unread_source,
        "degraded: model demo: pool short cannot read inferencepool+http://chatt.prod: namespace prod has",
    ),
    "stale report": (has_a_stale_report, "degraded: model demo: 1 of 2 replicas have no recent load report"),
    "no report": (has_no_report_at_all, "down: model demo: 2 of 2 replicas have no recent load report"),
    "no key": (
        wants_a_key,
        "note: queues and replicas are not accessible: the application returned 401",
    ),
    "no views": (
        lambda answers: answers.update({"status:/debug/queue": 500}),
        "degraded: queues and replicas are not available",
    ),
    "queue full": (
        lambda answers: queue(answers).update(waiting=2000),
        "degraded: model demo: 2,000 requests are queued, and the limit is 2,000, so requests are rejected",
    ),
    "queue nearly full": (
        lambda answers: queue(answers).update(waiting=1700),
        "risk: model demo: 1,700 requests are queued, and the limit is 2,000; beyond it",
    ),
    "long wait": (
        has_a_long_wait,
        "degraded: model demo: a request of class interactive has been queued for 45 s of at most",
    ),
    "saturated": (is_saturated, "risk: model demo: 7 requests are queued, and all 2 replicas are saturated"),
    "failed": (concluded(Outcome.FAILED, 5), "5 of 105 requests failed in an engine"),
    "expired": (concluded(Outcome.EXPIRED, 5), "5 of 105 requests exceeded their timeout in the queue"),
    "rejected": (
        concluded(Outcome.REJECTED_QUEUE_FULL, 5),
        "5 of 105 requests were rejected because the queue",
    ),
    "no replica alive": (
        concluded(Outcome.REJECTED_NO_REPLICA, 1),
        "1 of 101 requests were rejected because no",
    ),
    "put back": (put_back, "5 of 100 dispatches failed before the first byte"),
    "scheduler errors": (
        counts("ewsjf_scheduler_errors_total", 2),
        "its scheduler could not handle 2 events",
    ),
    "state": (
        counts('ewsjf_state_failures_total operation="save"', 3),
        "risk: model demo: writing learned state failed 3 times",
    ),
    "frozen": (
        lambda answers: model(answers).update(tuner={"frozen": "frozen by an admin"}),
        "note: model demo: the tuner is frozen by an admin",
    ),
    "decision log": (
        lambda answers: model(answers).update(decision_log_ended="max_events reached"),
        "note: model demo: the decision log has ended: max_events reached",
    ),
    "clock": (lambda answers: answers.update(skew_s=-900.0), "note: its clock is 90"),
    "other release": (speaks_otherwise, "note: the application's debug endpoints have an unexpected format"),
    "foreign": (
        lambda answers: answers.update({"/ready": "hello"}),
        "is not a gateway of this project (/ready: 200)",
    ),
    "front end alone": (
        lambda answers: answers.update({"/ready": "no server", "status:/ready": 503, "status:/health": 503}),
        "with 503, but no gateway behind it responds",
    ),
}


def test_a_healthy_application_has_no_findings(capsys: pytest.CaptureFixture[str]) -> None:
    with running() as url:
        assert main(["doctor", "--url", f"{url}/v1"]) == 0
    assert capsys.readouterr().out == f"{url}: no problems found\n"


@pytest.mark.parametrize(("change", "expected"), FINDINGS.values(), ids=FINDINGS)
def test_each_problem_is_reported_separately_with_a_next_step(
    change: Change, expected: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with running(change) as url:
        assert main(["doctor", "--url", url]) == 1
    finding, step = capsys.readouterr().out.splitlines()
    assert finding.startswith("1. ")
    assert expected in finding
    assert step.startswith("   next: ")


def test_the_worst_comes_first(capsys: pytest.CaptureFixture[str]) -> None:
    def several(answers: dict[str, Any]) -> None:
        for name in ("clock", "put back", "queue full", "no replica"):
            FINDINGS[name][0](answers)

    with running(several) as url:
        assert main(["doctor", "--url", url]) == 1
    findings = capsys.readouterr().out.splitlines()[::2]
    assert [line.split()[1] for line in findings] == ["down:", "degraded:", "risk:", "note:"]


def instance(url: str, folder: Path, config: str = "a.yaml") -> Instance:
    return Instance(pid=1, started_at=0.0, url=url, config=config, folder=str(folder))


def test_where_nothing_answers_the_applications_of_this_machine_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        silent = f"http://127.0.0.1:{taken.getsockname()[1]}"
    assert main(["doctor", "--url", silent]) == 1
    assert f"start it with {program()} serve CONFIG" in capsys.readouterr().out
    other = instance("http://127.0.0.1:7", tmp_path)
    monkeypatch.setattr(command, "running_instances", lambda: iter([other]))
    assert main(["doctor", "--url", silent]) == 1
    assert "applications run here at http://127.0.0.1:7 (a.yaml)" in capsys.readouterr().out
    starting = instance(silent, tmp_path)
    monkeypatch.setattr(command, "running_instances", lambda: iter([other, starting]))
    assert main(["doctor", "--url", silent]) == 1
    output = capsys.readouterr().out
    assert "the application of a.yaml is starting or stopping there" in output
    assert str(tmp_path) in output


def test_a_silent_program_on_the_port_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:

        def hang_up() -> None:
            other.accept()[0].close()

        thread = threading.Thread(target=hang_up)
        thread.start()
        assert main(["doctor", "--url", f"http://127.0.0.1:{other.getsockname()[1]}"]) == 1
        thread.join()
    # Parallel test runners may have renamed this process.
    assert re.search(rf"but its port is in use by \S.*\(process {os.getpid()}\)", capsys.readouterr().out)


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
        mine = instance(url, tmp_path, str(PACKAGED_CONFIG))
        monkeypatch.setattr(command, "running_instances", lambda: iter([mine]))
        assert main(["doctor", "--url", url]) == 1
    output = capsys.readouterr().out
    assert "first error of its engine: ValueError: weights are missing" in output
    assert str(tmp_path) in output


def test_the_one_application_of_this_machine_needs_no_url(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with running() as url:
        monkeypatch.setattr(application, "running_instances", lambda: iter([instance(url, tmp_path)]))
        assert main(["doctor"]) == 0
        assert capsys.readouterr().out == f"{url}: no problems found\n"
    two = [instance(f"http://127.0.0.1:{port}", tmp_path) for port in (1, 2)]
    monkeypatch.setattr(application, "running_instances", lambda: iter(two))
    assert main(["doctor"]) == 2
    assert "choose one with --url: http://127.0.0.1:1 (a.yaml), http://127.0.0.1:2" in capsys.readouterr().err


async def test_a_real_gateway_and_scheduler_are_understood(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    log = DecisionLogSettings(path=str(tmp_path / "decisions.jsonl"))
    options = LiveSchedulerOptions(incarnation=1, channel=ChannelSettings(), decision_log=log)
    scheduler = LiveScheduler(SchedulerSettings(model="demo"), options)

    async def shown() -> dict[str, Any]:
        return scheduler.status()

    async def queued() -> dict[str, Any]:
        return scheduler.queue()

    async def frozen(_: str) -> None:
        raise AssertionError

    dispatcher = FakeDispatcher([1])
    keeper = StatePersister(StateStore("memory://doctor", "scheduler", "demo"), "demo", lambda: None, 1.0)
    dispatcher.page = await scheduler.exposition() + keeper.exposition()
    views = {"demo": Answers(queue=queued, status=shown, freeze=frozen)}
    settings = GatewaySettings(
        models=(ServedModel(name="demo"),), keys=(ApiKey(tenant="ops", key="k1", admin=True),)
    )
    app = Gateway(settings, {"demo": dispatcher}, "gw", views)
    async with serving(app) as port:
        url = f"http://127.0.0.1:{port}"

        async def run_doctor(*more: str) -> tuple[int, str]:
            found = await asyncio.to_thread(main, ["doctor", "--url", url, *more])
            return found, capsys.readouterr().out

        assert await run_doctor("--api-key", "k1") == (0, f"{url}: no problems found\n")
        assert scheduler.status()["pools"] == ["short", "long"]
        found, output = await run_doctor()
        assert found == 1
        assert "returned 401" in output
        assert "has one if EWSJF_ADMIN_KEY is set for Ray" in output
        scheduler.stop("superseded")
        _, output = await run_doctor("--api-key", "k1")
        assert "its scheduler has ended: superseded" in output
        dispatcher.ports.clear()
        _, output = await run_doctor("--api-key", "k1")
        assert output.startswith("1. down: model demo has no replica")
