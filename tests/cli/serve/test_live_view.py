"""Lines that `serve` shows on a terminal while an application runs."""

import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from serve_app.cli.serve.terminal import LiveView
from tests.cli.pages import answering
from tests.cli.serve.application import configuration, terminal


class Page:
    """An application with a metrics page.

    Attributes:
        counts: concluded requests by outcome.
        waits: queue times of requests.
    """

    bounds = (0.001, 0.01, 0.1, 1.0, float("inf"))

    def __init__(self) -> None:
        self.url = ""
        self.status = 200
        self.counts = {"completed": 0, "rejected_queue_full": 0, "failed": 0}
        self.waits: list[float] = []
        self.replicas = {("demo", "short", "open"): 1, ("demo", "short", "saturated"): 1}

    def text(self) -> str:
        lines = ["# TYPE ewsjf_other gauge", "ewsjf_other 5"]
        for (model, pool, state), count in self.replicas.items():
            labels = f'model="{model}",pool="{pool}",state="{state}"'
            lines.append(f"ewsjf_pool_replicas{{{labels}}} {count}")
        for outcome, count in self.counts.items():
            labels = f'class="default",model="demo",outcome="{outcome}"'
            lines.append(f"ewsjf_requests_concluded_total{{{labels}}} {count}")
        for pool in ("short", "long"):
            for bound in self.bounds:
                count = sum(wait <= bound for wait in self.waits) if pool == "short" else 0
                le = "+Inf" if bound == float("inf") else bound
                lines.append(f'ewsjf_queue_wait_seconds_bucket{{pool="{pool}",le="{le}"}} {count}')
            lines.append(f'ewsjf_requests_in_flight{{pool="{pool}",replica="r"}} 2')
        lines += ['ewsjf_requests_waiting{class="default"} 3', 'ewsjf_requests_waiting{class="batch"} 1']
        return "\n".join(lines) + "\n"


@pytest.fixture
def page() -> Iterator[Page]:
    made = Page()
    with answering(lambda *_: (made.status, made.text())) as made.url:
        yield made


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    return now


def test_the_first_update_has_no_rate(page: Page) -> None:
    page.counts["completed"] = 70
    assert LiveView(page.url).text().splitlines() == [
        f"{page.url}/v1  short 2",
        "4 running, 4 waiting, 0.0 requests/s, 70 total",
    ]


def test_rates_and_waits_cover_the_last_updates(page: Page, clock: list[float]) -> None:
    page.counts["completed"], page.waits = 1_000, [0.5] * 1_000
    view = LiveView(page.url)
    view.text()
    clock[0] += 2.0
    page.counts |= {"completed": 1_010, "rejected_queue_full": 4}
    page.waits += [0.005] * 8 + [0.7] * 2
    assert view.text().splitlines()[1] == (
        "4 running, 4 waiting, 7.0 requests/s, 2.0 rejected/s, queue time: p50 <= 0.01 s, p95 <= 1 s, "
        "1014 total"
    )
    for _ in range(5):
        clock[0] += 2.0
        page.counts["failed"] += 1
        shown = view.text()
    # The rejections are older than the window of the rates.
    assert "0.5 requests/s, 0.5 failed/s, 1019 total" in shown


def test_pools_show_which_replicas_do_not_work(page: Page) -> None:
    page.replicas |= {("demo", "long", "draining"): 1, ("demo", "long", "open"): 0}
    assert f"{page.url}/v1  short 2, long 0 (1 draining)\n" in LiveView(page.url).text()


def test_several_models_are_listed_and_many_are_counted(page: Page) -> None:
    page.replicas = {(name, "all", "open"): 1 for name in "abcde"}
    assert "  a: all 1; b: all 1; c: all 1; 2 more models\n" in LiveView(page.url).text()


def test_a_restarted_scheduler_causes_no_negative_rate(page: Page, clock: list[float]) -> None:
    page.counts["completed"], page.waits = 50, [0.5] * 50
    view = LiveView(page.url)
    view.text()
    clock[0] += 2.0
    page.counts["completed"], page.waits = 3, [0.5] * 3
    assert view.text().endswith("0.0 requests/s, 3 total")


def test_an_application_without_an_answer_is_reported(page: Page) -> None:
    page.status = 403
    assert LiveView(page.url).text() == f"{page.url}/v1  /metrics requires an admin key"
    page.status = 500
    assert LiveView(page.url).text() == f"{page.url}/v1  /metrics returned 500"
    assert "does not respond: " in LiveView("http://127.0.0.1:9").text()


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_a_terminal_shows_starting_pools_and_then_the_traffic(tmp_path: Path) -> None:
    from experiments.common.application import free_port

    port = free_port()
    with terminal(configuration(tmp_path, port, drain_s=1.0)) as opened:
        opened.wait_for("long-demo 0/1")
        opened.wait_for("Ready after")
        opened.wait_for("short 1, long 1")
        opened.wait_for("0 running, 0 waiting, 0.0 requests/s")
        shown = opened.output
        log = tmp_path / "none"
        for line in shown.splitlines():
            if "output of Ray and Ray Serve: " in line:
                log = Path(line.partition("Ray Serve: ")[2].strip())
        assert log.read_text()
        # None of Ray's own lines.
        assert "INFO" not in shown
        assert "(pid=" not in shown
        opened.type_interrupt()
        assert opened.ended(60.0) == 0
