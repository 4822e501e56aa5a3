"""Store of a pool's choices, with a dictionary in place of Ray's control service."""

from pathlib import Path

import pytest

from serve_app.serving.remote import watcher
from serve_app.serving.remote.watcher import ChoicesStore, EndpointChoices

URL, OTHER = "http://127.0.0.1:1", "http://127.0.0.1:2"
NAME = "app/demo/short"


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> dict[str, bytes]:
    """Return the records of the cluster; an empty one is a new cluster."""
    records: dict[str, bytes] = {}
    monkeypatch.setattr(watcher, "write_record", records.__setitem__)
    monkeypatch.setattr(watcher, "read_record", records.get)
    return records


async def restored(state_uri: str | None, name: str = NAME) -> EndpointChoices:
    """Return the choices of a new watcher."""
    choices = EndpointChoices(ChoicesStore(state_uri, name))
    await choices.load()
    return choices


async def test_without_a_state_uri_choices_outlive_the_watcher_but_not_the_cluster(
    cluster: dict[str, bytes],
) -> None:
    choices = await restored(None)
    choices.add(URL, found=False)
    choices.remove(OTHER, found=True)
    assert await choices.save() is False
    assert ((await restored(None)).added, (await restored(None)).removed) == ({URL}, {OTHER})
    assert (await restored(None, "app/demo/long")).added == set()
    cluster.clear()
    assert (await restored(None)).added == set()


async def test_a_state_uri_that_a_deployment_adds_takes_over_the_choices(
    cluster: dict[str, bytes], tmp_path: Path
) -> None:
    choices = await restored(None)
    choices.add(URL, found=False)
    await choices.save()
    assert (await restored(str(tmp_path))).added == {URL}
    cluster.clear()
    choices = await restored(str(tmp_path))
    assert choices.added == {URL}
    choices.add(OTHER, found=False)
    assert await choices.save() is True
    assert (await restored(None)).added == {URL, OTHER}
