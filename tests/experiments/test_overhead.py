"""Overhead experiment: its client, light engines and forwarders."""

import asyncio
import re
from collections.abc import Iterator
from dataclasses import replace

import pytest

from experiments.common.errors import ExperimentError
from experiments.common.light_endpoint import LightServers, started_light_servers
from experiments.common.peers import PROXY, Endpoints, missing_program, next_port, started_nginx
from experiments.overhead.client import Client, Load, key_of, started_client
from experiments.overhead.peers import started_forwarder
from tests.experiments.scripted import document, scripted


@pytest.fixture(scope="module")
def light() -> Iterator[LightServers]:
    with started_light_servers() as servers:
        yield servers


@pytest.fixture(scope="module")
def endpoints(light: LightServers) -> Endpoints:
    ports = (next_port(), next_port())
    for port in ports:
        light.tell("open", port, 32_768)
    return Endpoints(ports)


@pytest.fixture(scope="module")
def client() -> Iterator[Client]:
    with started_client() as process:
        yield process


def load(url: str, *, body_bytes: int = 100, chunks: int = 0, clients: int = 4) -> Load:
    return Load(
        url=url,
        body_bytes=body_bytes,
        shared=False,
        stream=chunks > 0,
        tokens=max(1, chunks),
        clients=clients,
        seconds=0.2,
    )


def test_a_paced_stream_arrives_chunk_by_chunk(
    light: LightServers, endpoints: Endpoints, client: Client
) -> None:
    light.tell("answer", 8, 5)
    played = client.play(load(endpoints.urls[0], chunks=8))
    # Seven gaps of 5 ms separate eight chunks, so each of four clients gets at most six answers in 0.2 s.
    assert 4 <= played.requests <= 24
    assert played.first_p50_ms < 35


@pytest.mark.parametrize(("tenants", "sessions"), [(1, 0), (3, 0), (1, 2)])
async def test_requests_use_every_key_and_session_in_turn(
    tenants: int, sessions: int, client: Client
) -> None:
    async with scripted(document(200, {})) as server:
        await asyncio.to_thread(
            client.play, replace(load(server.url, clients=2), tenants=tenants, sessions=sessions)
        )
    heads = [
        {name.lower(): value for name, value in re.findall(r"([\w-]+): (.*)\r", head.decode())}
        for head in server.heads
    ]
    keys = {head["authorization"] for head in heads}
    assert keys == {f"Bearer {key_of(number)}" for number in range(tenants)}
    names: set[str | None] = {f"session-{number:06}" for number in range(sessions)} or {None}
    assert {head.get("x-session-id") for head in heads} == names


@pytest.mark.parametrize(("body_bytes", "chunks"), [(100, 0), (100, 8), (4_000_000, 0)])
def test_a_forwarder_passes_everything_on(
    body_bytes: int, chunks: int, light: LightServers, endpoints: Endpoints, client: Client
) -> None:
    light.tell("answer", chunks, 1)
    with started_forwarder(endpoints) as system:
        before = system.meter.read()
        assert client.play(load(system.url, body_bytes=body_bytes, chunks=chunks)).requests >= 4
        assert set(system.meter.used_since(before, 0.0)) == {PROXY}


@pytest.mark.skipif(missing_program("nginx", "") != "", reason="there is no nginx")
def test_nginx_forwards_requests(light: LightServers, endpoints: Endpoints, client: Client) -> None:
    light.tell("answer", 4, 1)
    with started_nginx(endpoints) as system:
        assert system.version
        assert client.play(load(system.url, chunks=4)).requests >= 4


def test_an_answer_that_is_none_ends_the_measurement(endpoints: Endpoints, client: Client) -> None:
    with pytest.raises(ExperimentError, match="404 Not Found"):
        client.play(load(endpoints.urls[0] + "/elsewhere"))
    with pytest.raises(ExperimentError, match="refused"):
        client.play(load(f"http://127.0.0.1:{next_port()}"))


def test_a_missing_program_is_reported_with_the_remedy() -> None:
    assert missing_program("no-such-router", "scripts/setup peers").endswith("router: scripts/setup peers")
