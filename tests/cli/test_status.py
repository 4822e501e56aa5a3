"""`ewsjf status` on documents with a live scheduler's fields."""

import argparse
import json
import socket
from collections.abc import Iterator
from email.message import Message
from pathlib import Path
from typing import Any

import pytest

from serve_app.cli import main
from serve_app.cli.application import ApplicationClient, ApplicationError
from serve_app.cli.serve.instance import Instance
from tests.cli.pages import answering

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


POSTED: list[str] = []


def answer(method: str, path: str, headers: Message) -> tuple[int, object]:
    if method == "POST":
        POSTED.append(path)
        message = f"the tuner will {path.rpartition('/')[2]}"
        return 200, {"models": [{"model": "demo", "message": message}]}
    if path == "/ready":
        return 200, {"status": "ready", "models_without_replica": []}
    if headers["authorization"] != "Bearer k1":
        return 401, {}
    documents = {
        "/debug/status": STATUS,
        "/debug/queue": QUEUE,
        "/debug/costs": COSTS,
        "/other/debug/status": {"hello": 1},
    }
    return (200, documents[path]) if path in documents else (404, {})


@pytest.fixture
def url() -> Iterator[str]:
    with answering(answer) as url:
        yield url


def test_tables_of_replicas_queue_tenants_and_tuner(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["status", "--url", url, "--api-key", "k1", "--sub-queues", "2"]) == 0
    shown = capsys.readouterr().out
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


def test_json_is_the_applications_answer(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["status", "--url", url, "--api-key", "k1", "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert [each["severity"] for each in shown.pop("findings")] == ["degraded"] * 9
    assert shown == {"status": STATUS, "queue": QUEUE, "costs": COSTS}


def test_a_key_without_admin_is_rejected_with_the_remedy(
    url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["status", "--url", url, "--api-key", "k2"]) == 2
    assert "401" in (message := capsys.readouterr().err)
    assert "pass an admin key with --api-key or EWSJF_API_KEY. `ewsjf serve` creates one." in message
    assert "that Ray Serve starts has one if EWSJF_ADMIN_KEY is set for Ray" in message


def client(url: str, api_key: str | None = None) -> ApplicationClient:
    return ApplicationClient(argparse.Namespace(url=url, api_key=api_key))


def test_an_address_without_a_gateway_is_rejected(url: str) -> None:
    with pytest.raises(ApplicationError, match="not a gateway of this project"):
        client(f"{url}/other", "k1").models("/debug/status")
    with pytest.raises(ApplicationError, match="http://"):
        client("file:///etc/passwd").models("/x")
    with pytest.raises(ApplicationError, match="does not respond"):
        client("http://127.0.0.1:9").models("/debug/status")


def test_one_command_freezes_and_thaws_every_tuner(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    POSTED.clear()
    assert main(["status", "--url", url, "--api-key", "k1", "--freeze-tuner"]) == 0
    assert main(["status", "--url", url, "--api-key", "k1", "--thaw-tuner"]) == 0
    assert POSTED == ["/debug/tuner/freeze", "/debug/tuner/thaw"]
    expected = ("demo: the tuner will freeze", "demo: the tuner will thaw")
    assert tuple(capsys.readouterr().out.splitlines()) == expected


def test_the_key_that_serve_made_is_used_for_its_application_alone(
    url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("EWSJF_API_KEY", raising=False)
    (tmp_path / "admin-key").write_text("k1")
    here = Instance(pid=1, started_at=0.0, url=url, config="x.yaml", folder=str(tmp_path))
    monkeypatch.setattr("serve_app.cli.application.running_instances", lambda: iter([here]))
    assert main(["status", "--url", url]) == 0
    assert main(["status", "--url", url.replace("127.0.0.1", "localhost") + "/"]) == 0
    assert main(["status", "--url", url, "--api-key", "k2"]) == 2
    assert client("http://127.0.0.1:1").api_key is None


def only_at(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Use a default address, whatever other tests run on this machine."""
    monkeypatch.setattr("serve_app.cli.application.running_instances", lambda: iter(()))
    monkeypatch.setattr("serve_app.cli.application._LOCAL_URL", url)


def test_without_an_address_the_local_application_is_queried(
    url: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    only_at(url, monkeypatch)
    assert main(["status", "--api-key", "k1"]) == 0
    assert "other requests have precedence" in capsys.readouterr().out


def test_where_nothing_runs_the_message_names_the_address(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        nowhere = f"http://127.0.0.1:{unused.getsockname()[1]}"
        only_at(nowhere, monkeypatch)
        assert main(["status"]) == 2
        (guessed,) = capsys.readouterr().err.splitlines()
        assert main(["status", "--url", nowhere]) == 2
        (given,) = capsys.readouterr().err.splitlines()
    assert given == guessed
    assert given.startswith(f"status: nothing responds at {nowhere}: [Errno 111] Connection refused: ")
