"""Full disk: pending writes are lost, but no request."""

import errno
import os
from pathlib import Path
from typing import Any

import pytest
from fsspec.implementations.local import LocalFileOpener
from prometheus_client import CollectorRegistry

from serve_app.errors import Outcome
from serve_app.request import Usage
from serve_app.serving.scheduler.journal import DecisionLogSettings
from serve_app.serving.scheduler.usage import PersistentUsage
from tests.builders import key
from tests.serving.channel.harness import FAST, ControlPlane, granted, scheduler_settings, wait_until
from tests.serving.gateway.fleet import fleet_of

from .audited import MarkedEngine, answers, ends_of


class Disk:
    """fsspec's disk: once it is full, a write succeeds in half, as in a kernel."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.is_full = False
        written = LocalFileOpener.write

        def write(file: Any, data: bytes) -> Any:
            if not self.is_full:
                return written(file, data)
            written(file, data[: len(data) // 2])
            raise OSError(errno.ENOSPC, "No space left on device")

        monkeypatch.setattr(LocalFileOpener, "write", write)


def full_log() -> DecisionLogSettings:
    """Return a log on a full disk: buffered lines fail when they are written."""
    return DecisionLogSettings(path="/dev/full")


async def test_requests_continue_when_the_disk_of_the_decision_log_is_full() -> None:
    engines = [MarkedEngine()]
    async with fleet_of(engines, parts={"decision_log": full_log()}) as fleet:
        assert ends_of(await answers(fleet, 30, 0.5)) == {"answered": 30}
        fleet.control_plane.live.flush()
        assert "No space left" in fleet.control_plane.live.status()["decision_log_ended"]
        assert ends_of(await answers(fleet, 5, 0.1, label="later")) == {"answered": 5}


async def test_a_scheduler_stops_in_order_when_its_decision_log_cannot_be_written() -> None:
    """Its successor starts once `stop` returns, as after a settings change."""
    control_plane = ControlPlane(scheduler_settings(), FAST)
    live = await control_plane.begin(decision_log=full_log())
    live.stop("its settings have changed")
    assert live.end_reason
    await control_plane.close()


async def test_a_scheduler_starts_without_a_log_that_cannot_be_opened(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").touch()
    control_plane = ControlPlane(scheduler_settings(), FAST)
    path = str(tmp_path / "file" / "log.jsonl")
    await control_plane.begin(decision_log=DecisionLogSettings(path=path))
    await control_plane.replica("s1")
    assert await granted(await control_plane.gateway(), "r1")
    assert control_plane.live.status()["decision_log_ended"]
    assert f"event=decision_log_ended path={path}" in caplog.text
    await control_plane.close()


async def test_usage_is_saved_once_there_is_room_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    disk = Disk(monkeypatch)
    usage = PersistentUsage("m", str(tmp_path), "app/m", 0.05, CollectorRegistry())
    await usage.load()
    usage.start()
    control_plane = ControlPlane(scheduler_settings(), FAST)
    await control_plane.begin(usage_ledger=usage.ledger)
    gateway = await control_plane.gateway()
    await control_plane.replica()
    disk.is_full = True
    for number in range(10):
        await granted(gateway, f"r{number}", key=key("k1"))
        gateway.end(f"r{number}", Outcome.COMPLETED, Usage(prompt_tokens=30, output_tokens=7))
    await wait_until(lambda: "event=state_unreachable operation=save" in caplog.text, "a save fails")
    disk.is_full = False
    await control_plane.close()
    await usage.close()
    restarted = PersistentUsage("m", str(tmp_path), "app/m", 60.0, CollectorRegistry())
    await restarted.load()
    (row,) = restarted.ledger.rows()
    assert (row["requests"], row["prompt_tokens"]) == (10, 300)
    await restarted.close()
    # Nothing of the failed writes is left.
    assert [Path(name).suffix for name in os.listdir(tmp_path)] == [".json"]  # noqa: PTH208
