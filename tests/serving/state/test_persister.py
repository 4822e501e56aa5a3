import asyncio
import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import CollectorRegistry, generate_latest

from serve_app.serving import state
from serve_app.serving.state import SAVE_TIMEOUT_S, StateError, StatePersister, StateStore
from tests.serving.channel.harness import wait_until


class FlakyStore(StateStore):
    """Store that hangs or fails on demand."""

    def __init__(self, folder: Path) -> None:
        super().__init__(str(folder), "scheduler", "m")
        self.error: Exception | None = None
        self.gate = threading.Event()
        self.gate.set()
        self.calls = 0

    def load(self) -> Mapping[str, Any] | None:
        self._pass()
        return super().load()

    def save(self, document: Mapping[str, Any]) -> bool:
        self._pass()
        return super().save(document)

    def written_at(self) -> int:
        return Path(self.path).stat().st_mtime_ns

    def _pass(self) -> None:
        self.calls += 1
        self.gate.wait()
        if self.error is not None:
            raise self.error


@pytest.fixture
def store(tmp_path: Path) -> Iterator[FlakyStore]:
    store = FlakyStore(tmp_path)
    yield store
    store.gate.set()


class Keeper(StatePersister):
    """Persister with a registry of its metrics."""

    def __init__(self, store: StateStore, document: dict[str, Any] | None, interval_s: float) -> None:
        self.registry = CollectorRegistry()
        super().__init__(store, "m", lambda: document and dict(document), interval_s, self.registry)


def reject(_: object) -> None:
    raise ValueError("it makes no sense")


def keeper(store: StateStore, document: dict[str, Any] | None, interval_s: float = 60.0) -> Keeper:
    return Keeper(store, document, interval_s)


def sample(keeper: Keeper, name: str) -> float:
    page = generate_latest(keeper.registry).decode()
    lines = [line for line in page.splitlines() if line.startswith(name)]
    return float(lines[0].rpartition(" ")[2])


async def test_a_changed_state_is_saved_periodically(store: FlakyStore) -> None:
    document = {"n": 1}
    kept = keeper(store, document, 0.01)
    kept.start()
    kept.start()
    await wait_until(lambda: Path(store.path).exists())
    written_at = store.written_at()
    calls = store.calls
    await wait_until(lambda: store.calls > calls + 2)
    assert store.written_at() == written_at, "nothing had changed"
    document["n"] = 2
    await wait_until(lambda: (store.load() or {}).get("n") == 2)
    await kept.close()
    assert sample(kept, "ewsjf_state_saved_timestamp_seconds{") > 1.7e9


async def test_before_the_first_save_its_time_is_that_of_the_start(store: FlakyStore) -> None:
    """At 0, the alert StateNotSaved would fire after every start."""
    assert time.time() - sample(keeper(store, None), "ewsjf_state_saved_timestamp_seconds{") < 900


async def test_the_state_is_saved_at_the_end(store: FlakyStore) -> None:
    kept = keeper(store, {"n": 3})
    kept.start()
    await kept.close()
    found: list[Mapping[str, Any]] = []
    assert await keeper(store, None).load(found.append)
    assert found == [{"n": 3}]


async def test_nothing_is_saved_without_state(store: FlakyStore) -> None:
    await keeper(store, None).close()
    assert store.calls == 0


async def test_an_unreachable_store_is_logged_once_and_counted(
    store: FlakyStore, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    kept = keeper(store, {"n": 1})
    store.error = StateError("no route to host")
    assert not await kept.load(reject)
    await kept.save()
    await kept.save()
    assert repr(kept).endswith("unreachable>")
    assert sample(kept, 'ewsjf_state_failures_total{model="m",operation="load"}') == 1
    assert sample(kept, 'ewsjf_state_failures_total{model="m",operation="save"}') == 2
    store.error = None
    await kept.save()
    log_events = [record.getMessage().split()[0] for record in caplog.records]
    assert log_events == ["event=state_unreachable", "event=state_reachable"]
    assert store.load() == {"n": 1}


async def test_a_store_that_hangs_delays_nothing(store: FlakyStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(state, "LOAD_TIMEOUT_S", 0.05)
    monkeypatch.setattr(state, "_LAST_SAVE_TIMEOUT_S", 0.05)
    kept = keeper(store, {"n": 1})
    store.gate.clear()
    assert not await kept.load(reject)
    async with asyncio.timeout(SAVE_TIMEOUT_S / 2):
        await kept.close()
    assert store.calls == 1, "no second call begins before the first has returned"
    store.gate.set()
    await kept.save()
    assert store.load() == {"n": 1}


async def test_a_state_that_cannot_be_written_as_json_is_a_failure_and_no_crash(store: FlakyStore) -> None:
    kept = keeper(store, {"n": object()}, 0.01)
    kept.start()
    await wait_until(lambda: sample(kept, 'ewsjf_state_failures_total{model="m",operation="save"}') > 1)
    await kept.close()


async def test_a_rejected_state_is_set_aside_in_the_background(store: FlakyStore) -> None:
    kept = keeper(store, {"n": 1})
    await kept.save()
    assert await kept.load(reject)
    await wait_until(lambda: Path(f"{store.path}.rejected").exists())
    assert await kept.load(reject), "there is no state any more"
    assert sample(kept, 'ewsjf_state_failures_total{model="m",operation="restore"}') == 1


async def test_close_waits_for_a_running_save(store: FlakyStore) -> None:
    document = {"n": 1}
    kept = keeper(store, document, 0.01)
    store.gate.clear()
    kept.start()
    await wait_until(lambda: store.calls == 1)
    document["n"] = 2
    asyncio.get_running_loop().call_later(0.05, store.gate.set)
    await kept.close()
    assert store.load() == {"n": 2}
