"""`ewsjf batch`, against a gateway in another thread."""

import argparse
import asyncio
import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from serve_app.cli import main
from serve_app.cli.application import ApplicationClient, UnreachableError
from serve_app.cli.command import writing
from serve_app.errors import ServeAppError
from tests.cli.pages import answering
from tests.serving.gateway.batches.test_api import contents, line, served
from tests.serving.gateway.builders import chat


@pytest.fixture
def url(tmp_path: Path) -> Iterator[str]:
    """Run a gateway with a Batch API."""
    found: list[str] = []
    ready, stop = threading.Event(), threading.Event()

    async def serve() -> None:
        async with served(tmp_path / "store") as (_, fleet):
            found.append(f"http://127.0.0.1:{fleet.port}")
            ready.set()
            await asyncio.to_thread(stop.wait)

    thread = threading.Thread(target=asyncio.run, args=(serve(),))
    thread.start()
    assert ready.wait(10)
    yield found[0]
    stop.set()
    thread.join()


def batch(url: str, *words: object) -> int:
    """Run the command."""
    return main(["batch", *map(str, words), "--url", url])


def test_a_file_is_submitted_and_its_results_are_written(
    url: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "in.jsonl"
    path.write_bytes(contents([*map(line, range(10)), line(10, body=chat(model="unknown"))]))
    assert batch(url, "submit", path, "--wait") == 1
    assert "completed, 10 of 11 requests completed, 1 failed" in capsys.readouterr().out
    results = [json.loads(each) for each in (tmp_path / "in.output.jsonl").read_text().splitlines()]
    assert [each["custom_id"] for each in results] == [f"id-{number}" for number in range(10)]
    (error,) = (tmp_path / "in.error.jsonl").read_text().splitlines()
    assert json.loads(error)["custom_id"] == "id-10"


def test_a_batch_is_listed_shown_cancelled_and_fetched(
    url: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert batch(url, "list") == 0
    assert capsys.readouterr().out == "there are no batches\n"
    path = tmp_path / "in.jsonl"
    path.write_bytes(contents(map(line, range(3))))
    assert batch(url, "submit", path, "--json") == 0
    created: dict[str, Any] = json.loads(capsys.readouterr().out)
    assert created["endpoint"] == "/v1/chat/completions"
    batch_id = created["id"]
    while True:
        assert batch(url, "show", batch_id) == 0
        if json.loads(capsys.readouterr().out)["status"] == "completed":
            break
    assert batch(url, "cancel", batch_id) == 0
    assert f"{batch_id}: completed" in capsys.readouterr().out
    assert batch(url, "list") == 0
    assert batch_id in capsys.readouterr().out
    assert batch(url, "fetch", batch_id, "--out", tmp_path / "results") == 0
    assert len((tmp_path / "results").read_text().splitlines()) == 3


def test_mistakes_are_explained(url: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "in.jsonl"
    assert batch(url, "submit", path) == 2
    assert "cannot be read: No such file" in capsys.readouterr().err
    path.write_text("{}")
    assert batch(url, "submit", path) == 2
    assert "the first line must be a request such as" in capsys.readouterr().err
    path.write_bytes(contents([line(1), line(1)]))
    assert batch(url, "submit", path) == 2
    assert "line 2: custom_id 'id-1' occurs twice" in capsys.readouterr().err
    path.write_bytes(contents([line(1), line(2, url="/v1/completions")]))
    assert batch(url, "submit", path) == 1
    assert "line 2: url is /v1/completions, but the endpoint is" in capsys.readouterr().err
    assert batch(url, "submit") == 2
    assert "submit needs a file" in capsys.readouterr().err
    assert batch(url, "show", "batch_none") == 2
    assert "there is no batch 'batch_none'" in capsys.readouterr().err
    assert batch("http://127.0.0.1:9", "list") == 2


def save(url: str, place: Path) -> None:
    client = ApplicationClient(argparse.Namespace(url=url, api_key="k"))
    with writing(place) as draft, draft.open("wb", buffering=0) as out:
        client.save("/v1/files/f/content", out, 5.0)


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs the device of a full disk")
def test_a_full_disk_is_reported_with_the_file() -> None:
    with (
        answering(lambda *_: (200, "line")) as url,
        pytest.raises(ServeAppError, match="/dev/full cannot be written: No space left on device"),
    ):
        save(url, Path("/dev/full"))


def test_an_application_that_does_not_answer_is_reported_with_its_address(tmp_path: Path) -> None:
    with answering(lambda *_: (200, "")) as url:
        pass
    with pytest.raises(UnreachableError, match=f"^{url} does not respond: "):
        save(url, tmp_path / "results")
