"""Collection of a body, however the server splits it."""

import asyncio
import itertools
import json
import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st

from serve_app.serving.gateway import GatewaySettings, ServedModel
from serve_app.serving.gateway.batches.runner import CollectingExchange
from serve_app.serving.gateway.models import ServedModels
from serve_app.serving.gateway.path import Request
from serve_app.serving.gateway.request.reader import RequestReader, _collect
from serve_app.serving.gateway.settings import RouteSettings
from tests.serving.gateway.builders import FakeDispatcher, request_of

CHAT = "/v1/chat/completions"
MODEL = ServedModel(name="m")

pieces = st.lists(
    st.integers(0, 3) | st.integers(4_090, 4_100) | st.integers(60_000, 70_000), min_size=1, max_size=8
)


class InPieces(CollectingExchange):
    """Request whose body arrives in these pieces."""

    def __init__(self, sent: list[bytes]) -> None:
        super().__init__(CHAT, b"")
        self.more_body = True
        self._left = iter(sent)
        self._numbers, self._count = itertools.count(1), len(sent)

    async def receive(self) -> bytes:
        self.more_body = next(self._numbers) < self._count
        return next(self._left)


def reader_of(
    sent: list[bytes], models: tuple[ServedModel, ...] = (MODEL,), routes: tuple[RouteSettings, ...] = ()
) -> tuple[RequestReader, Request]:
    """Build a reader and a request whose body arrives in these pieces."""
    schedulers = {model.name: FakeDispatcher([]) for model in models}
    reader = RequestReader(GatewaySettings(models=models), ServedModels(models, schedulers, routes))
    return reader, request_of(InPieces(sent), "g-1")


async def collected(sent: list[bytes]) -> tuple[bytes, int]:
    """Return the collected body, and the bytes that the reader holds for it."""
    reader, request = reader_of(sent)
    buffered = await reader.body(request)
    body, held_bytes = buffered.data, reader.bodies.held_bytes
    buffered.release()
    reader.close()
    return body, held_bytes


@given(pieces)
def test_a_body_in_pieces_is_the_body_that_was_sent(sizes: list[int]) -> None:
    whole = bytes(range(256)) * 3_000
    starts = [0, *itertools.accumulate(sizes)]
    sent = [whole[start:end] for start, end in itertools.pairwise(starts)]
    body, held_bytes = asyncio.run(collected(sent))
    assert body == whole[: starts[-1]]
    assert isinstance(body, bytes)
    assert held_bytes == len(body)


def test_a_body_in_one_piece_is_not_copied() -> None:
    sent = b"x" * 100_000
    assert asyncio.run(collected([sent]))[0] is sent


def test_small_pieces_take_no_more_than_their_length() -> None:
    found: list[bytes | bytearray] = []
    for piece in [b"x"] * 10_000 + [b"y" * 5_000] + [b"z"] * 10_000:
        _collect(found, piece)
    assert [len(piece) for piece in found] == [10_000, 5_000, 10_000]


TEXT = "a word, and another. " * 22_000


@pytest.mark.parametrize(
    ("content", "on_the_loop"),
    [(TEXT, False), (TEXT.replace(",", ""), True), (TEXT.replace(",", "") * 2, False)],
    ids=["many signs", "long text", "longer text"],
)
async def test_only_slow_bodies_are_parsed_on_a_thread(
    content: str, on_the_loop: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads: list[threading.Thread] = []
    monkeypatch.setattr(
        "serve_app.serving.gateway.request.reader.check_structure",
        lambda _: threads.append(threading.current_thread()),
    )
    body = json.dumps({"model": "m", "messages": [{"role": "user", "content": content}]}).encode()
    reader, request = reader_of([body])
    await reader.read(request)
    assert request.body.data == body
    assert (threads == [threading.current_thread()]) is on_the_loop
    request.body.release()
    reader.close()


@pytest.mark.parametrize("chosen", ["resumed", "short"])
async def test_a_request_to_a_route_has_the_options_of_its_chosen_model(chosen: str) -> None:
    models = (
        ServedModel(name="short", max_model_len=100),
        ServedModel(name="resumed", max_model_len=900, resume_streams=True),
    )
    route = RouteSettings(name="m", models={"short": chosen == "short", "resumed": chosen == "resumed"})
    body = {"model": "m", "stream": True, "messages": [{"role": "user", "content": "hello"}]}
    reader, request = reader_of([json.dumps(body).encode()], models, (route,))
    await reader.read(request)
    assert request.submission.spec.model == chosen
    assert request.form.continuable == ({"resumed": 900} if chosen == "resumed" else {})
    assert request.submission.revocable is (chosen == "resumed")
    request.body.release()
    reader.close()
