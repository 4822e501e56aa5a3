"""`ewsjf status`: the tables of an application, and what it says of one that does not serve as it should."""

import argparse
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

Answered = dict[str, Any]
"""Content by path; `status:PATH` is its status if that is not 200."""
Change = Callable[[Answered], object]

STATUS: dict[str, Any] = {
    "models": [
        {
            "model": "demo",
            "incarnation": 2,
            "ended": "",
            "gateways": 1,
            "queues": {"learned": 7, "age_s": 12.3},
            "waiting": {"interactive": 0, "default": 4, "batch": 0},
            "replicas": {
                "s1": {
                    "pool": "short",
                    "in_flight": 3,
                    "state": "suspended",
                    "limit": "16 in flight, learned 12:03 UTC (starts were 0.8 s late)",
                    "stale": False,
                    "report": {"running": 2, "waiting": 1, "kv_usage_ratio": 0.25, "tpot_s": 0.0123},
                },
                "l1": {
                    "pool": "long",
                    "in_flight": 0,
                    "state": "stale",
                    "stale": True,
                    "report": None,
                    "max_model_len": None,
                    "learned_context_tokens": 8_192,
                },
            },
            "endpoints": [
                {
                    "pool": "short",
                    "endpoints": 8,
                    "down": [
                        {
                            "url": f"http://b:{port}",
                            "replica": "b",
                            "reason": "not identified yet",
                            "since": 1_700_000_000.0,
                        }
                        for port in range(7)
                    ],
                    "unread_sources": [{"source": "file:///urls", "reason": "No such file"}],
                }
            ],
            "tuner": {
                "mode": "advise",
                "state": "idle",
                "twin": {
                    "step_times": "fitted to the engines (once)",
                    "error": {"ttft_ratio": 0.031, "tpot_ratio": -0.012, "requests": 120},
                    "max_error_ratio": 0.15,
                },
                "values": {"b_u": 0.12},
                "audit": [{"age_s": 31.0, "what": "rolled back", "why": "short attainment fell by 4 %"}],
            },
        },
    ]
}
QUEUE: dict[str, Any] = {
    "models": [
        {
            "model": "demo",
            "policy": "ewsjf",
            "waiting": 4,
            "sub_queues": [
                {
                    "priority": "default",
                    "tenant": f"t{number}",
                    "length_queue": "17-40",
                    "waiting": 2,
                    "wait_s": 9.5 - number,
                    "score": 0.5,
                    "reason": "short: other requests have precedence",
                }
                for number in range(3)
            ],
            "sub_queues_omitted": 1,
            "served": {"default": {"t0": 1_200.0}, "batch": {}},
        }
    ]
}


COSTS = {
    "models": [
        {
            "model": "demo",
            "since": 1_700_000_000.0,
            "counted_s": 3_600.0,
            "engine_seconds": 5_000.0,
            "rows": [
                {
                    "pool": "short",
                    "class": "batch",
                    "tenant": f"payer{number}",
                    "engine_seconds": 4_321.0 / (number + 1),
                    "gpu_seconds": None,
                    "share": 0.77 / (number + 1),
                    "imposed_delay_seconds": 98.7,
                }
                for number in range(12)
            ],
        }
    ]
}


def scheduler() -> LiveScheduler:
    options = LiveSchedulerOptions(incarnation=1, channel=ChannelSettings())
    return LiveScheduler(SchedulerSettings(model="demo"), options)


async def healthy() -> Answered:
    """Return the answers of an application that serves."""
    found = scheduler()
    return {
        "/ready": {"status": "ready", "models_without_replica": []},
        "/debug/status": {"models": [found.status()]},
        "/debug/queue": {"models": [found.queue()]},
        "/debug/costs": {"models": []},
        **{
            f"/debug/tuner/{word}": {"models": [{"model": "demo", "message": f"the tuner will {word}"}]}
            for word in ("freeze", "thaw")
        },
    }


def has_tables(answers: Answered) -> None:
    answers.update({"/debug/status": STATUS, "/debug/queue": QUEUE, "/debug/costs": COSTS})


@contextmanager
def running(change: Change | None = None) -> Iterator[str]:
    """Serve an application whose admin has the key k1."""
    answers = asyncio.run(healthy())
    if change is not None:
        change(answers)

    def answer(method: str, path: str, headers: Message) -> tuple[int, object]:
        if path.startswith("/debug") and headers["authorization"] != "Bearer k1":
            return 401, {}
        if method != ("POST" if "tuner" in path else "GET"):
            return 405, {}
        usual = 200 if path in answers else 404
        return answers.get(f"status:{path}", usual), answers.get(path, "not found")

    with answering(answer) as url:
        yield url


@pytest.fixture(autouse=True)
def _environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """Use the admin's key, and ignore what else runs on this machine."""
    monkeypatch.setenv("EWSJF_API_KEY", "k1")
    runs(monkeypatch)


def runs(monkeypatch: pytest.MonkeyPatch, *instances: Instance) -> None:
    """Let these be the applications of this machine."""
    for module in (status, application):
        monkeypatch.setattr(module, "running_instances", lambda: iter(instances))


def instance(url: str, folder: Path, config: str = "a.yaml") -> Instance:
    return Instance(pid=1, started_at=0.0, url=url, config=config, folder=str(folder))


Show = Callable[..., tuple[int, str, str]]


@pytest.fixture
def show(capsys: pytest.CaptureFixture[str]) -> Show:
    """Return a function that runs `status`, and returns its exit status, output and errors."""

    def run(*options: str) -> tuple[int, str, str]:
        code = main(["status", *options])
        return code, *capsys.readouterr()

    return run


def test_tables_of_replicas_queue_tenants_and_tuner(show: Show) -> None:
    with running(has_tables) as url:
        code, shown, _ = show("--url", url, "--sub-queues", "2")
    assert code == 1
    for text in (
        "waiting: 4 default; length queues: 7 learned, 12 s ago",
        "12.3",
        "25%",
        "stale",
        "suspended",
        "16 in flight, learned 12:03 UTC (starts were 0.8 s late)",
        "l1 reports no context limit; learned from rejected requests: 8,192 tokens",
        "7 of 8 endpoints of pool short down: http://b:1: not identified yet, since 2023-11-14 22:13:20 UTC",
        "2 more endpoints of pool short down: GET /admin/endpoints lists them",
        "pool short cannot read file:///urls: No such file",
        "t1",
        "other requests have precedence",
        "2 more",
        "1,200",
        "tuner: advise, idle",
        "b_u 0.12",
        "short attainment fell by 4 %",
        "cost by tenant, since 2023-11-14 22:13 UTC; 2 more in /debug/costs",
        "4,321.0 s",
        "77%",
        "98.7 s",
    ):
        assert text in shown
    assert "t2" not in shown
    assert "payer10" not in shown


def test_json_is_the_applications_answer(show: Show) -> None:
    with running(has_tables) as url:
        _, output, _ = show("--url", url, "--json")
    shown = json.loads(output)
    severities = [each["severity"] for each in shown.pop("findings")]
    assert severities == ["down", *["degraded"] * 8]  # no replica of the two pools accepts requests
    assert shown == {"status": STATUS, "queue": QUEUE, "costs": COSTS}


def test_one_command_freezes_and_thaws_every_tuner(show: Show) -> None:
    with running() as url:
        for word in ("freeze", "thaw"):
            assert show("--url", url, f"--{word}-tuner") == (0, f"demo: the tuner will {word}\n", "")


def has_no_replica(answers: Answered) -> None:
    answers["/ready"] = {"status": "waiting", "models_without_replica": ["demo"]}
    answers["status:/ready"] = 503


def has_no_scheduler(answers: Answered) -> None:
    has_no_replica(answers)
    answers["/ready"]["models_without_scheduler"] = ["demo"]
    for path in ("status", "queue", "costs"):
        answers[f"/debug/{path}"]["models"] = [{"model": "demo", "error": "its scheduler does not respond"}]


def has_lost_its_scheduler(answers: Answered) -> None:
    answers["/debug/status"]["models"] = [{"model": "demo", "error": "gone"}]


def is_stopping(answers: Answered) -> None:
    answers["/ready"] = {"status": "stopping", "models_without_replica": []}
    answers["status:/ready"] = 503


FULL = (
    "degraded: model demo: 2,000 requests are queued, and the limit is 2,000, so requests are rejected with "
    "429\n"
)


def queues(waiting: int, limit: int) -> Change:
    return lambda answers: answers["/debug/queue"]["models"][0].update(waiting=waiting, max_waiting=limit)


@pytest.mark.parametrize(
    ("change", "code", "expected"),
    [
        (None, 0, "URL: no problems found\n\ndemo\n"),
        (queues(581, 2_000), 0, "URL: no problems found; 581 requests are queued\n"),
        (queues(2_000, 2_000), 0, FULL),
        (has_no_replica, 1, "down: model demo has no replica, so its requests are rejected with 503"),
        (is_stopping, 1, "down: the application is stopping"),
        (has_lost_its_scheduler, 1, "down: model demo: gone; new requests are queued until it is back"),
        # They are queued, not rejected with 503.
        (has_no_scheduler, 1, "down: model demo: no scheduler is connected; new requests are queued"),
    ],
)
def test_the_most_severe_comes_first_and_sets_the_exit_status(
    change: Change | None, code: int, expected: str, show: Show
) -> None:
    with running(change) as url:
        found, shown, _ = show("--url", f"{url}/v1")
        as_json = show("--url", url, "--json")
    assert found == as_json[0] == code
    assert shown.startswith(expected.replace("URL", url))
    findings = json.loads(as_json[1])["findings"]
    assert [f"{each['severity']}: {each['what']}\n  next: {each['next_step']}\n" for each in findings] == (
        re.findall("^(?:down|degraded): .*\n  next: .*\n", shown, re.MULTILINE)
    )
    assert shown.count("down: ") == code


def test_objectives_that_a_gateway_does_not_know_are_named_with_the_remedy(show: Show) -> None:
    def named(answers: Answered) -> None:
        unknown = {"unknown_objectives": {"premium": 1_200, "other": 3}, "known_objectives": ["batch", "vip"]}
        answers["/debug/status"] |= unknown

    with running(named) as url:
        code, shown, _ = show("--url", url)
    assert code == 0
    assert shown.startswith(
        "risk: requests name objectives that this gateway does not know, so these have no effect: other (3), "
        "premium (1,200)\n  next: add them to gateway.objectives; known: batch, vip. If they are "
    )


def test_a_key_without_admin_is_rejected_with_the_remedy_after_what_needs_none(show: Show) -> None:
    with running(has_no_replica) as url:
        code, shown, message = show("--url", url, "--api-key", "k2")
    assert code == 2
    assert shown.startswith("down: model demo has no replica")
    assert "401" in message
    assert "pass an admin key with --api-key or EWSJF_API_KEY. `ewsjf serve` creates one." in message
    assert "that Ray Serve starts has one if EWSJF_ADMIN_KEY is set for Ray" in message


def test_the_key_that_serve_made_is_used_for_its_application_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, show: Show
) -> None:
    monkeypatch.delenv("EWSJF_API_KEY")
    (tmp_path / "admin-key").write_text("k1")
    with running() as url, running() as other:
        runs(monkeypatch, instance(url, tmp_path))
        assert show("--url", url)[0] == 0
        assert show("--url", url.replace("127.0.0.1", "localhost") + "/")[0] == 0
        assert show("--url", url, "--api-key", "k2")[0] == 2
        assert show("--url", other)[0] == 2


def test_without_an_address_the_one_application_of_this_machine_is_queried(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, show: Show
) -> None:
    with running() as url:
        monkeypatch.setattr(application, "_LOCAL_URL", url)
        assert show()[1].startswith(f"{url}: no problems found\n")
        monkeypatch.setattr(application, "_LOCAL_URL", "http://127.0.0.1:9")
        runs(monkeypatch, instance(url, tmp_path))
        assert show()[1].startswith(f"{url}: no problems found\n")
    runs(monkeypatch, *(instance(f"http://127.0.0.1:{port}", tmp_path) for port in (1, 2)))
    code, _, message = show()
    assert code == 2
    assert "choose one with --url: http://127.0.0.1:1 (a.yaml), http://127.0.0.1:2" in message


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"/ready": "hello"}, "is not a gateway of this project (/ready: 200)"),
        ({"/ready": "no server", "status:/ready": 503}, "with 503, but no gateway behind it responds"),
        ({"/debug/status": {"hello": 1}}, "not a gateway of this project"),
    ],
)
def test_what_is_no_gateway_is_named_with_the_remedy(change: Answered, expected: str, show: Show) -> None:
    with running(lambda answers: answers.update(change)) as url:
        code, _, message = show("--url", url)
    assert code == 2
    assert expected in message


def test_where_nothing_answers_the_applications_of_this_machine_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, show: Show
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        silent = f"http://127.0.0.1:{taken.getsockname()[1]}"
    code, _, message = show("--url", silent)
    assert code == 2
    assert message.startswith(f"status: nothing responds at {silent}: [Errno 111] Connection refused: ")
    assert f"start it with {program()} serve CONFIG" in message
    # The message for the default address is the same.
    monkeypatch.setattr(application, "_LOCAL_URL", silent)
    assert show() == (2, "", message)
    other = instance("http://127.0.0.1:7", tmp_path)
    runs(monkeypatch, other)
    code, _, message = show("--url", silent)
    assert code == 2
    assert "applications run here at http://127.0.0.1:7 (a.yaml)" in message
    runs(monkeypatch, other, instance(silent, tmp_path))
    code, _, message = show("--url", silent)
    assert code == 2
    assert "the application of a.yaml is starting or stopping there" in message
    assert str(tmp_path) in message
    assert "the URL must begin with http:// or https://" in show("--url", "file:///etc/passwd")[2]


def test_a_client_of_an_address_without_an_application_is_rejected() -> None:
    client = application.ApplicationClient(argparse.Namespace(url="http://127.0.0.1:9", api_key=None))
    with pytest.raises(application.ApplicationError, match="does not respond"):
        client.models("/debug/status")


def test_a_silent_program_on_the_port_is_named(show: Show) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:

        def hang_up() -> None:
            other.accept()[0].close()

        thread = threading.Thread(target=hang_up)
        thread.start()
        code, _, message = show("--url", f"http://127.0.0.1:{other.getsockname()[1]}")
        thread.join()
    assert code == 2
    # Parallel test runners may have renamed this process.
    assert re.search(rf"but its port is in use by \S.*\(process {os.getpid()}\)", message)


@pytest.mark.parametrize("import_path", ["serve_app.app:build_app", "an_extension:build_app"])
def test_a_missing_replica_of_a_local_application_has_its_engines_last_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, show: Show, import_path: str
) -> None:
    config = tmp_path / "config.yaml"
    config.write_text(templates.EMULATED.read_text().replace("serve_app.app:build_app", import_path))
    logs = tmp_path / "ray/session_latest/logs"
    logs.mkdir(parents=True)
    (logs / "worker-1-01000000-1.err").write_text(
        ":actor_name:ServeReplica:ewsjf:short-demo\n"
        "(EngineCore_DP0 pid=7) ERROR 11-22 21:00:00 [core.py:1] ValueError: weights are missing\n"
    )
    with running(has_no_replica) as url:
        runs(monkeypatch, instance(url, tmp_path, str(config)))
        code, output, _ = show("--url", url)
    assert code == 1
    assert "first error of its engine: ValueError: weights are missing" in output
    assert str(tmp_path) in output


async def test_a_real_gateway_and_scheduler_are_understood(show: Show) -> None:
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

        found, output, _ = await asyncio.to_thread(show, "--url", url)
        assert found == 0
        assert output.startswith(f"{url}: no problems found\n")
        live.stop("superseded")
        _, output, _ = await asyncio.to_thread(show, "--url", url)
        assert output.startswith("degraded: model demo: its scheduler has ended: superseded")
        dispatcher.ports.clear()
        found, output, _ = await asyncio.to_thread(show, "--url", url)
        assert found == 1
        assert output.startswith("down: model demo has no replica")
