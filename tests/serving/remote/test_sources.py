"""Discovery by DNS and Kubernetes, against servers of these protocols."""

import asyncio
import contextlib
import json
import socket
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import dns.message
import dns.rrset
import pytest
from aiohttp import web
from dns.asyncresolver import Resolver

from serve_app.request import PriorityClass
from serve_app.serving.gateway import GatewaySettings, ServedModel
from serve_app.serving.gateway.deployment import follow_objectives
from serve_app.serving.remote import sources
from serve_app.serving.remote.sources import (
    ApiServer,
    EndpointSource,
    EndpointUrl,
    FixedSource,
    InferencePoolSource,
    KubernetesSource,
    PolledSource,
    SourceHealth,
    service_records,
    source_of,
)
from tests.serving.channel.harness import wait_until
from tests.serving.gateway.builders import chat
from tests.serving.gateway.conftest import running_gateway

FoundUrls = list[set[str]]


@contextlib.asynccontextmanager
async def followed(
    source: EndpointSource, refresh_s: float = 0.05, health: SourceHealth | None = None
) -> AsyncIterator[FoundUrls]:
    """Follow a source; yield the list of its results."""
    found_urls: FoundUrls = []
    health = health or SourceHealth("")
    task = asyncio.create_task(
        source.follow(lambda urls: found_urls.append({str(url) for url in urls}), refresh_s, health)
    )
    try:
        yield found_urls
        assert not task.done() or isinstance(source, FixedSource)
    finally:
        task.cancel()
        await asyncio.wait([task])


@pytest.mark.parametrize(
    "text",
    [
        *("a:8000", "tcp://a", "dns://a:8000", "dns+a:8000", "srv+tcp://a", "file://relative", "file://"),
        *("kubernetes+http://", "kubernetes+http://a.b?selector=x", "kubernetes+http://ns?selector=x"),
        *("kubernetes+http://svc:80?labels=a", "inferencepool+pool", "inferencepool+http://pool:8000"),
    ],
)
def test_a_source_of_no_known_form_is_rejected_with_its_text(text: str) -> None:
    with pytest.raises(ValueError, match=r"got|known"):
        source_of(text)


async def test_a_url_is_reported_once() -> None:
    async with followed(source_of("http://a:8000/v1")) as found_urls:
        await wait_until(lambda: bool(found_urls))
        assert found_urls == [{"http://a:8000"}]


async def test_each_address_of_a_name_is_an_endpoint(monkeypatch: pytest.MonkeyPatch) -> None:
    addresses = ["10.0.0.1", "10.0.0.2"]

    async def resolved(host: str, port: int, **_: Any) -> list[Any]:
        assert host == "engines.test"
        if not addresses:
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (each, port)) for each in addresses]

    monkeypatch.setattr(asyncio.get_running_loop(), "getaddrinfo", resolved)
    async with followed(source_of("dns+https://engines.test:8443/v1")) as found_urls:
        await wait_until(lambda: len(found_urls) == 1)
        assert found_urls[-1] == {"https://10.0.0.1:8443", "https://10.0.0.2:8443"}
        # A failing DNS zone removes no endpoint.
        gone = list(addresses)
        addresses.clear()
        await asyncio.sleep(0.2)
        assert len(found_urls) == 1
        addresses.extend([gone[0], "fd00::7"])
        await wait_until(lambda: len(found_urls) == 2)
        assert found_urls[-1] == {"https://10.0.0.1:8443", "https://[fd00::7]:8443"}


async def test_the_certificate_of_a_resolved_address_must_be_of_the_name() -> None:
    found: list[EndpointUrl] = []
    source = source_of("dns+https://localhost:8443")
    following = asyncio.create_task(source.follow(found.extend, 0.05, SourceHealth("")))
    await wait_until(lambda: bool(found))
    following.cancel()
    assert {url.server_name for url in found} == {"localhost"}


class NameServer(asyncio.DatagramProtocol):
    """DNS server that answers every SRV question with the test's records."""

    def __init__(self) -> None:
        self.records: list[str] = []
        self.transport: asyncio.DatagramTransport | None = None

    def connection_made(self, transport: Any) -> None:
        self.transport = transport

    def datagram_received(self, data: bytes, addr: Any) -> None:
        query = dns.message.from_wire(data)
        answer = dns.message.make_response(query)
        if self.records:
            name = query.question[0].name
            answer.answer.append(dns.rrset.from_text(name, 1, "IN", "SRV", *self.records))
        assert self.transport is not None
        self.transport.sendto(answer.to_wire(), addr)


async def test_srv_records_state_hosts_and_ports() -> None:
    server = NameServer()
    transport, _ = await asyncio.get_running_loop().create_datagram_endpoint(
        lambda: server, local_addr=("127.0.0.1", 0)
    )
    try:
        resolver = Resolver(configure=False)
        resolver.nameservers, resolver.port = ["127.0.0.1"], transport.get_extra_info("sockname")[1]
        server.records = ["0 1 8001 gpu-1.test.", "0 1 8002 gpu-2.test."]
        url = EndpointUrl.parse("http://_vllm._tcp.test")
        async with followed(PolledSource(partial(service_records, url, resolver))) as found_urls:
            await wait_until(lambda: len(found_urls) == 1)
            assert found_urls[-1] == {"http://gpu-1.test:8001", "http://gpu-2.test:8002"}
            server.records = []
            await asyncio.sleep(0.2)
            assert len(found_urls) == 1
            server.records = ["0 1 8001 gpu-1.test."]
            await wait_until(lambda: len(found_urls) == 2)
            assert found_urls[-1] == {"http://gpu-1.test:8001"}
    finally:
        transport.close()


class FakeApiServer:
    """Kubernetes API server that lists and watches, with a history that can expire."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.objects: dict[str, Any] = {}
        self.version = 1
        self.oldest = 0
        self.queries: list[dict[str, str]] = []
        self.paths: set[str] = set()
        self.tokens: set[str] = set()
        self.rejects = 0
        self.rejection: dict[str, Any] = {"status": 403}
        # Watches end at once, or repeat these bytes forever.
        self.ends_watches_at_once = False
        self.repeats = b""
        self.times: list[float] = []
        self._changes: list[tuple[int, dict[str, Any]]] = []
        self._watches: dict[asyncio.Queue[str | None], web.Request] = {}
        (folder / "token").write_text("first")
        (folder / "namespace").write_text("models")

    def put(self, item: dict[str, Any], kind: str = "MODIFIED") -> None:
        self.version += 1
        item["metadata"]["resourceVersion"] = str(self.version)
        if kind == "DELETED":
            del self.objects[item["metadata"]["name"]]
        elif kind != "BOOKMARK":
            self.objects[item["metadata"]["name"]] = item
        event = {"type": kind, "object": item}
        if kind != "BOOKMARK":
            self._changes.append((self.version, event))
        self.say(event)

    def say(self, event: dict[str, Any]) -> None:
        for queue, request in self._watches.items():
            if _is_of(event["object"], request):
                queue.put_nowait(json.dumps(event) + "\n")

    def end_watches(self) -> None:
        for queue in self._watches:
            queue.put_nowait(None)

    async def answer(self, request: web.Request) -> web.StreamResponse:
        self.queries.append(dict(request.query))
        self.times.append(asyncio.get_running_loop().time())
        self.paths.add(request.path)
        self.tokens.add(request.headers["authorization"])
        if self.rejects:
            self.rejects -= 1
            return web.json_response({"message": "forbidden"}, **self.rejection)
        if "watch" not in request.query:
            items = [each for each in self.objects.values() if _is_of(each, request)]
            return web.json_response({"metadata": {"resourceVersion": str(self.version)}, "items": items})
        if int(request.query["resourceVersion"]) < self.oldest:
            return web.json_response({"code": 410}, status=410)
        response = web.StreamResponse(status=self.rejection["status"] if self.repeats else 200)
        await response.prepare(request)
        while self.repeats:
            await response.write(self.repeats)
            await asyncio.sleep(0.01)
        if self.ends_watches_at_once:
            return response
        queue: asyncio.Queue[str | None] = asyncio.Queue()
        # What has changed since the client's version, as a real one sends first.
        for version, event in self._changes:
            if version > int(request.query["resourceVersion"]) and _is_of(event["object"], request):
                queue.put_nowait(json.dumps(event) + "\n")
        self._watches[queue] = request
        try:
            while (line := await queue.get()) is not None:
                # In two pieces, as a network may split it.
                await response.write(line[:20].encode())
                await response.write(line[20:].encode())
        finally:
            del self._watches[queue]
        return response

    @property
    def watched(self) -> bool:
        return bool(self._watches)


def _is_of(item: dict[str, Any], request: web.Request) -> bool:
    """Return whether an object is in a collection. Objects without labels match every selector."""
    labels = item.get("metadata", {}).get("labels")
    wanted = [each.split("=") for each in request.query["labelSelector"].split(",") if each]
    kind = item.get("kind", "")
    is_custom = request.path.rpartition("/")[2] in ("inferencepools", "inferenceobjectives")
    return (request.path.endswith(f"/{kind.lower()}s") if kind else not is_custom) and (
        labels is None or all(labels.get(name) == value for name, value in wanted)
    )


@pytest.fixture
async def api(tmp_path: Path) -> AsyncIterator[tuple[FakeApiServer, ApiServer]]:
    double = FakeApiServer(tmp_path)
    app = web.Application()
    app.router.add_get("/{path:.*}", double.answer)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    port = runner.addresses[0][1]
    yield double, ApiServer(url=f"http://127.0.0.1:{port}", account=tmp_path)
    await runner.cleanup()


def slice_of(name: str, *addresses: str, port: int = 8000, **conditions: bool) -> dict[str, Any]:
    return {
        "metadata": {"name": name},
        "ports": [{"name": "http", "port": port}],
        "endpoints": [
            {"addresses": [each], "conditions": conditions or {"ready": True}} for each in addresses
        ],
    }


def pod(name: str, address: str | None, ready: str = "True", **metadata: Any) -> dict[str, Any]:
    status = {"podIP": address, "conditions": [{"type": "Ready", "status": ready}]}
    return {"metadata": {"name": name, **metadata}, "status": status}


def pool_of(name: str, labels: dict[str, str], *ports: int) -> dict[str, Any]:
    """Return an InferencePool as the schema of Gateway API's inference extension has it."""
    return {
        "apiVersion": "inference.networking.k8s.io/v1",
        "kind": "InferencePool",
        "metadata": {"name": name},
        "spec": {
            "selector": {"matchLabels": labels},
            "targetPorts": [{"number": port} for port in ports],
            "endpointPickerRef": {"name": "epp", "port": {"number": 9002}},
        },
    }


def objective_of(name: str, pool: str, **spec: int) -> dict[str, Any]:
    """Return an InferenceObjective as the schema of Gateway API's inference extension has it."""
    return {
        "apiVersion": "inference.networking.x-k8s.io/v1alpha2",
        "kind": "InferenceObjective",
        "metadata": {"name": name},
        "spec": {"poolRef": {"group": "inference.networking.k8s.io", "name": pool}, **spec},
    }


def source_at(text: str, server: ApiServer) -> KubernetesSource:
    return replace(KubernetesSource.parse(text), api=server)


def pool_at(text: str, server: ApiServer) -> InferencePoolSource:
    return replace(InferencePoolSource.parse(text), api=server)


async def test_the_endpoints_of_a_service_are_followed(api: tuple[FakeApiServer, ApiServer]) -> None:
    double, server = api
    double.put(slice_of("a", "10.0.0.1", "10.0.0.2"))
    async with followed(source_at("http://vllm.prod/v1", server)) as found_urls:
        await wait_until(lambda: double.watched)
        assert found_urls == [{"http://10.0.0.1:8000", "http://10.0.0.2:8000"}]
        double.put(slice_of("b", "10.0.0.3", port=8001), "ADDED")
        await wait_until(lambda: len(found_urls) == 2)
        assert "http://10.0.0.3:8001" in found_urls[-1]
        # A terminating endpoint and one that is not ready get no new requests.
        double.put(slice_of("a", "10.0.0.1", ready=True, terminating=True))
        double.put(slice_of("b", "10.0.0.3", ready=False))
        await wait_until(lambda: found_urls[-1] == set())
        double.put(slice_of("a", "10.0.0.9"))
        await wait_until(lambda: found_urls[-1] == {"http://10.0.0.9:8000"})
        double.put(slice_of("a", "10.0.0.9"), "DELETED")
        await wait_until(lambda: found_urls[-1] == set())
    assert double.paths == {"/apis/discovery.k8s.io/v1/namespaces/prod/endpointslices"}
    assert all(queries["labelSelector"] == "kubernetes.io/service-name=vllm" for queries in double.queries)


async def test_pods_by_label_are_followed_in_the_namespace_that_is_named(
    api: tuple[FakeApiServer, ApiServer],
) -> None:
    double, server = api
    double.put(pod("a", "10.0.0.1", "True"))
    double.put(pod("starts", None, "False"))
    async with followed(source_at("http://prod:9000?selector=app=vllm,tier=gpu", server)) as found_urls:
        await wait_until(lambda: double.watched)
        assert found_urls == [{"http://10.0.0.1:9000"}]
        double.put(pod("starts", "10.0.0.2", "True"))
        await wait_until(lambda: len(found_urls) == 2)
        double.put(pod("a", "10.0.0.1", "True", deletionTimestamp="2026-01-01T00:00:00Z"))
        await wait_until(lambda: found_urls[-1] == {"http://10.0.0.2:9000"})
    assert double.paths == {"/api/v1/namespaces/prod/pods"}
    assert double.queries[0]["labelSelector"] == "app=vllm,tier=gpu"


async def test_the_pods_of_an_inference_pool_are_followed_through_its_changes(
    api: tuple[FakeApiServer, ApiServer],
) -> None:
    double, server = api
    qwen, llama = {"app": "qwen", "tier": "gpu"}, {"app": "llama"}
    double.put(pool_of("chat", qwen, 8000))
    double.put(pod("a", "10.0.0.1", labels=qwen))
    double.put(pod("other", "10.0.0.9", labels=llama))
    async with followed(pool_at("http://chat.prod", server)) as found_urls:
        await wait_until(lambda: found_urls == [{"http://10.0.0.1:8000"}])
        double.put(pod("b", "10.0.0.2", labels=qwen), "ADDED")
        await wait_until(lambda: found_urls[-1] == {"http://10.0.0.1:8000", "http://10.0.0.2:8000"})
        # Ranks of data parallelism: each port of a Pod is an endpoint.
        double.put(pool_of("chat", llama, 8000, 8001))
        await wait_until(lambda: found_urls[-1] == {"http://10.0.0.9:8000", "http://10.0.0.9:8001"})
        double.put(pod("b", "10.0.0.2", "False", labels=qwen))
        double.put(pod("other", "10.0.0.8", labels=llama))
        await wait_until(lambda: found_urls[-1] == {"http://10.0.0.8:8000", "http://10.0.0.8:8001"})
    assert double.paths == {
        "/apis/inference.networking.k8s.io/v1/namespaces/prod/inferencepools",
        "/api/v1/namespaces/prod/pods",
    }
    selectors = {query["labelSelector"] for query in double.queries}
    assert selectors == {"", "app=qwen,tier=gpu", "app=llama"}


async def test_a_missing_inference_pool_is_named_with_those_that_exist_and_removes_no_endpoint(
    api: tuple[FakeApiServer, ApiServer],
) -> None:
    double, server = api
    double.put(pool_of("chat", {"app": "qwen"}, 8000))
    double.put(pool_of("code", {"app": "coder"}, 8000))
    double.put(pod("a", "10.0.0.1"))
    health = SourceHealth("inferencepool+http://chatt")
    async with followed(pool_at("http://chatt", server), health=health) as found_urls:
        await wait_until(lambda: bool(health.failure))
        assert health.failure == "namespace models has no InferencePool chatt (existing: chat, code)"
        assert found_urls == []
        double.put(pool_of("chatt", {"app": "qwen"}, 8000))
        await wait_until(lambda: found_urls == [{"http://10.0.0.1:8000"}] and not health.failure)
        double.put(pool_of("chatt", {"app": "qwen"}, 8000), "DELETED")
        await wait_until(lambda: "has no InferencePool chatt" in health.failure)
        double.put(pod("a", "10.0.0.2"))
        await wait_until(lambda: found_urls[-1] == {"http://10.0.0.2:8000"})


async def test_requests_can_name_the_objectives_of_an_inference_pool(
    api: tuple[FakeApiServer, ApiServer],
) -> None:
    double, server = api
    double.rejects = 1
    double.put(objective_of("premium", "chat", priority=100))
    double.put(objective_of("standard", "chat"))
    double.put(objective_of("of-another-pool", "code", priority=7))
    pools = ("inferencepool+http://chat.prod",)
    # Aliases of a model have the same pools.
    settings = GatewaySettings(models=tuple(ServedModel(name=each, inference_pools=pools) for each in "ab"))
    async with running_gateway() as harness:

        async def priority_of(objective: str) -> PriorityClass:
            headers = {"x-gateway-inference-objective": objective}
            answer = await harness.http.post("/v1/chat/completions", json=chat(), headers=headers)
            assert answer.status_code == 200
            return harness.dispatcher.submissions[-1].priority

        async def becomes(objective: str, priority: PriorityClass) -> None:
            async with asyncio.timeout(20):
                while await priority_of(objective) is not priority:  # noqa: ASYNC110 - over HTTP
                    await asyncio.sleep(0.005)

        (following,) = follow_objectives(settings, harness.gateway, server, refresh_s=0.05)
        await wait_until(lambda: double.watched)
        assert await priority_of("premium") is PriorityClass.INTERACTIVE
        assert await priority_of("standard") is PriorityClass.DEFAULT
        assert await priority_of("of-another-pool") is PriorityClass.DEFAULT
        double.put(objective_of("premium", "chat", priority=-10))
        double.put(objective_of("batch", "chat", priority=1), "ADDED")
        await becomes("batch", PriorityClass.INTERACTIVE)
        assert await priority_of("premium") is PriorityClass.BATCH
        double.put(objective_of("batch", "chat"), "DELETED")
        await becomes("batch", PriorityClass.BATCH)
        following.cancel()
    path = "/apis/inference.networking.x-k8s.io/v1alpha2/namespaces/prod/inferenceobjectives"
    assert double.paths == {path}


async def test_pods_of_an_inference_pool_that_cannot_be_read_are_reported(
    api: tuple[FakeApiServer, ApiServer],
) -> None:
    double, server = api
    double.put(pool_of("chat", {"app": "qwen"}, 8000))
    health = SourceHealth("inferencepool+http://chat")
    async with followed(pool_at("http://chat", server), health=health) as found_urls:
        await wait_until(lambda: found_urls == [set()])
        double.rejects = 2
        double.end_watches()
        await wait_until(lambda: "answered 403" in health.failure)
        await wait_until(lambda: not health.failure)


async def test_a_watch_that_ends_resumes_where_it_was(api: tuple[FakeApiServer, ApiServer]) -> None:
    double, server = api
    double.put(slice_of("a", "10.0.0.1"))
    async with followed(source_at("http://vllm", server)) as found_urls:
        await wait_until(lambda: double.watched)
        double.put({"metadata": {"name": "-"}}, "BOOKMARK")
        version = str(double.version)
        queries = len(double.queries)
        await wait_until(lambda: len(found_urls) == 1)
        double.end_watches()
        await wait_until(lambda: len(double.queries) > queries and double.watched)
        assert double.queries[-1]["resourceVersion"] == version
        assert len(found_urls) == 1
        # Kubernetes rotates tokens while the process runs.
        (double.folder / "token").write_text("second")
        double.end_watches()
        await wait_until(lambda: "Bearer second" in double.tokens)


@pytest.mark.parametrize("as_event", [False, True])
async def test_a_version_that_is_too_old_begins_with_a_list_again(
    api: tuple[FakeApiServer, ApiServer], as_event: bool
) -> None:
    double, server = api
    double.put(slice_of("a", "10.0.0.1"))
    async with followed(source_at("http://vllm:7000", server)) as found_urls:
        await wait_until(lambda: double.watched)
        double.objects["b"] = slice_of("b", "10.0.0.2")
        double.version += 10
        double.oldest = double.version
        if as_event:
            double.say({"type": "ERROR", "object": {"code": 410, "message": "too old"}})
        else:
            double.end_watches()
        await wait_until(lambda: found_urls[-1] == {"http://10.0.0.1:7000", "http://10.0.0.2:7000"})


async def test_watches_that_end_at_once_are_reopened_with_growing_pauses(
    api: tuple[FakeApiServer, ApiServer],
) -> None:
    double, server = api
    double.put(slice_of("a", "10.0.0.1"))
    double.ends_watches_at_once = True
    async with followed(source_at("http://vllm", server)) as found_urls:
        await asyncio.sleep(1.0)
        assert 3 <= len(double.queries) <= 12
        assert [query for query in double.queries if "watch" not in query] == double.queries[:1]
        double.ends_watches_at_once = False
        double.put(slice_of("a", "10.0.0.2"))
        await wait_until(lambda: found_urls[-1] == {"http://10.0.0.2:8000"})


async def test_versions_that_are_always_too_old_are_listed_with_growing_pauses(
    api: tuple[FakeApiServer, ApiServer],
) -> None:
    double, server = api
    double.put(slice_of("a", "10.0.0.1"))
    double.oldest = double.version + 1
    async with followed(source_at("http://vllm", server)) as found_urls:
        await asyncio.sleep(1.0)
        # Each attempt is a list and a watch.
        assert 4 <= len(double.queries) <= 24
        double.oldest = 0
        double.put(slice_of("a", "10.0.0.2"))
        await wait_until(lambda: found_urls[-1] == {"http://10.0.0.2:8000"})


@pytest.mark.parametrize(("header", "least_s"), [("1", 1.0), ("Wed, 21 Oct 2026 07:28:00 GMT", 0.02)])
async def test_an_overloaded_api_server_is_queried_again_after_its_retry_after(
    api: tuple[FakeApiServer, ApiServer], header: str, least_s: float
) -> None:
    double, server = api
    double.put(slice_of("a", "10.0.0.1"))
    double.rejects, double.rejection = 1, {"status": 429, "headers": {"retry-after": header}}
    health = SourceHealth("kubernetes+http://vllm")
    async with followed(source_at("http://vllm", server), health=health) as found_urls:
        await wait_until(lambda: "answered 429" in health.failure)
        await wait_until(lambda: bool(found_urls) and not health.failure)
    assert double.times[1] - double.times[0] >= least_s


@pytest.mark.parametrize(
    ("status", "repeats", "reason"),
    [(200, b"x" * 500, "longer than"), (500, b"x", "answered 500"), (200, b"null\n", "TypeError")],
)
async def test_a_stream_that_never_ends_is_left(
    api: tuple[FakeApiServer, ApiServer],
    monkeypatch: pytest.MonkeyPatch,
    status: int,
    repeats: bytes,
    reason: str,
) -> None:
    monkeypatch.setattr(sources, "_LONGEST_LINE_BYTES", 5_000, raising=False)
    monkeypatch.setattr(sources, "_LIST_TIMEOUT_S", 0.3)
    double, server = api
    double.put(slice_of("a", "10.0.0.1"))
    double.rejection, double.repeats = {"status": status}, repeats
    health = SourceHealth("kubernetes+http://vllm")
    failures: list[str] = []
    monkeypatch.setattr(SourceHealth, "fail", lambda _, text: failures.append(text))
    async with followed(source_at("http://vllm", server), health=health) as found_urls:
        await wait_until(lambda: any(reason in text for text in failures))
        double.repeats = b""
        double.put(slice_of("a", "10.0.0.2"))
        await wait_until(lambda: found_urls[-1] == {"http://10.0.0.2:8000"})


async def test_an_inference_pool_without_ports_is_named_and_removes_no_endpoint(
    api: tuple[FakeApiServer, ApiServer],
) -> None:
    double, server = api
    double.put(pool_of("chat", {"app": "qwen"}, 8000))
    double.put(pod("a", "10.0.0.1"))
    health = SourceHealth("inferencepool+http://chat")
    async with followed(pool_at("http://chat", server), health=health) as found_urls:
        await wait_until(lambda: found_urls == [{"http://10.0.0.1:8000"}])
        broken = pool_of("chat", {"app": "qwen"})
        broken["spec"]["targetPorts"] = None
        double.put(broken)
        await wait_until(lambda: health.failure == "InferencePool chat has no targetPorts")
        double.put(pod("a", "10.0.0.2"))
        await wait_until(lambda: found_urls[-1] == {"http://10.0.0.2:8000"})
        double.put(pool_of("chat", {"app": "qwen"}, 9000))
        await wait_until(lambda: found_urls[-1] == {"http://10.0.0.2:9000"})


async def test_a_pod_with_addresses_of_two_families_is_one_endpoint(
    api: tuple[FakeApiServer, ApiServer],
) -> None:
    double, server = api

    def of_pods(name: str, **addresses: str) -> dict[str, Any]:
        made = slice_of(name, *addresses.values())
        for endpoint, uid in zip(made["endpoints"], addresses, strict=True):
            endpoint["targetRef"] = {"kind": "Pod", "name": uid, "uid": uid}
        return made

    double.put(of_pods("six", a="fd00::1", b="fd00::2"))
    double.put(of_pods("four", a="10.0.0.1"))
    double.put(of_pods("also-four", a="10.0.0.1", c="10.0.0.3"))
    async with followed(source_at("http://vllm", server)) as found_urls:
        await wait_until(lambda: double.watched)
        assert found_urls == [{"http://10.0.0.1:8000", "http://[fd00::2]:8000", "http://10.0.0.3:8000"}]
        # Of addresses that are equivalent by definition, clients may use the first.
        several = of_pods("four", a="10.0.0.1")
        several["endpoints"][0]["addresses"].append("10.0.0.9")
        double.put(several)
        double.put(of_pods("six", b="fd00::4"))
        await wait_until(lambda: len(found_urls) == 2)
        assert found_urls[-1] == {"http://10.0.0.1:8000", "http://[fd00::4]:8000", "http://10.0.0.3:8000"}


async def test_a_rejection_of_the_api_server_removes_no_endpoint(
    api: tuple[FakeApiServer, ApiServer], caplog: pytest.LogCaptureFixture
) -> None:
    double, server = api
    double.put(slice_of("a", "10.0.0.1"))
    async with followed(source_at("http://vllm", server)) as found_urls:
        await wait_until(lambda: double.watched)
        double.rejects = 3
        double.end_watches()
        await wait_until(lambda: not double.rejects and double.watched)
        assert all(each == {"http://10.0.0.1:8000"} for each in found_urls)
    assert caplog.text.count("answered 403") == 1  # repeated reasons are logged once


async def test_outside_of_a_pod_the_reason_is_logged(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    source: EndpointSource = source_of("kubernetes+http://vllm.prod:8000")
    logged: Callable[[], bool] = lambda: "does not run in a pod" in caplog.text  # noqa: E731
    async with followed(source) as found_urls:
        await wait_until(logged)
        assert found_urls == []


@pytest.mark.parametrize(
    ("text", "read"),
    [
        ("http://a:8000", "http://a:8000"),
        ("http://a:8000/v1/", "http://a:8000"),
        ("http://a", "http://a:80"),
        ("https://a/openai/v1", "https://a:443/openai"),
        ("http://[::1]:8000", "http://[::1]:8000"),
    ],
)
def test_the_parts_of_an_endpoints_url(text: str, read: str) -> None:
    assert str(EndpointUrl.parse(text)) == read


@pytest.mark.parametrize("text", ["", "a:8000", "ftp://a", "http://", "http://a:99999", "http://a/?b=c"])
def test_an_invalid_url_is_named(text: str) -> None:
    with pytest.raises(ValueError, match=r"http://host:8000, got '"):
        EndpointUrl.parse(text)


def test_credentials_do_not_belong_in_a_url_and_are_not_repeated() -> None:
    with pytest.raises(ValueError, match="api_key") as rejected:
        EndpointUrl.parse("http://user:secret@a:8000")
    assert "secret" not in str(rejected.value)
