"""Sources of endpoints: a URL, DNS, a file, Kubernetes and InferencePools.

- `source_of`: the source that a configuration names, by its form.
- `EndpointSource`: the protocol of all sources; `SourceHealth`: their health.
- `KubernetesSource`: the endpoints of a Service, or the Pods of a label selector.
- `InferencePoolSource`: the Pods of an InferencePool.
- `PolledSource`: DNS and files, which are polled.

`EndpointSource`. A source reports all endpoints at once, again after each change. While it cannot be read,
the last result stays valid, because an outage of discovery must not remove engines that serve.

`KubernetesSource`. The API server is queried for a list, and then for a watch from the list's version. A
watch whose version is too old restarts with a list, and a broken one is restarted; until then the last result
stays valid. Pauses between attempts grow while watches end early, because each list of a large namespace
costs the API server.

The pod needs a service account that may get, list and watch `endpointslices` (group `discovery.k8s.io`) or
`pods` in the namespace, and for InferencePools also `inferencepools` (group `inference.networking.k8s.io`).
Gateways also read `inferenceobjectives` (group `inference.networking.x-k8s.io`) there.
"""

import asyncio
import contextlib
import functools
import json
import logging
import math
import os
import random
import socket
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, Protocol
from urllib.parse import parse_qs, unquote, urlencode, urlsplit

from dns.asyncresolver import Resolver
from dns.exception import DNSException

from serve_app.serving.channel.scheduler_client import ServerAddress
from serve_app.serving.gateway.upstream import UpstreamError, UpstreamPool, UpstreamResponse, UpstreamSettings
from serve_app.serving.tls import ClientTls

_PORTS = {"http": 80, "https": 443}


@dataclass(frozen=True, slots=True, order=True)
class EndpointUrl:
    """Address of an endpoint.

    Attributes:
        host: name or address.
        path: prefix of `/v1`, without a trailing slash.
        server_name: name that was resolved to `host`; verified in the certificate of an HTTPS server.
    """

    scheme: Literal["http", "https"]
    host: str
    port: int
    path: str = ""
    server_name: str = ""

    @classmethod
    def parse(cls, text: str) -> "EndpointUrl":
        """Parse a URL such as `http://10.0.0.7:8000`, with or without `/v1` at the end.

        Raises:
            ValueError: it is not such a URL; the message quotes it.
        """
        rejection = f"an endpoint's URL looks like http://host:8000, got {text!r}"
        try:
            parts = urlsplit(text.strip())
            port = parts.port
        except ValueError as exc:
            raise ValueError(rejection) from exc
        if parts.scheme not in _PORTS or not parts.hostname or parts.query or parts.fragment:
            raise ValueError(rejection)
        if parts.username is not None or parts.password is not None:
            raise ValueError(
                f"{parts.scheme}://{parts.hostname}: give credentials as api_key, not in the URL"
            )
        path = parts.path.rstrip("/").removesuffix("/v1").rstrip("/")
        scheme: Literal["http", "https"] = "https" if parts.scheme == "https" else "http"
        return cls(scheme, parts.hostname, port or _PORTS[scheme], path)

    def __str__(self) -> str:
        return f"{self.scheme}://{self.authority}{self.path}"

    @property
    def authority(self) -> str:
        """Host and port in the form of a URL."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{host}:{self.port}"


logger = logging.getLogger("ray.serve")

Publish = Callable[[frozenset[EndpointUrl]], None]


@dataclass(slots=True)
class SourceHealth:
    """Why a source cannot be read, for operators; each reason is logged once.

    Attributes:
        source: its form in the configuration.
        failure: empty if it was read.
    """

    source: str
    failure: str = ""

    def fail(self, reason: str) -> None:
        """Record that it cannot be read."""
        if reason != self.failure:
            logger.warning("event=discovery_failed source=%s reason=%r", self.source, reason)
        self.failure = reason


class EndpointSource(Protocol):
    """A source of endpoints."""

    def follow(self, publish: Publish, refresh_s: float, health: SourceHealth) -> Coroutine[Any, Any, None]:
        """Report all endpoints, again after each change; return only if nothing can change.

        While the source cannot be read, the last result stays valid, because an outage of discovery must not
        remove engines that serve.
        """
        ...


Document = Mapping[str, Any]
Show = Callable[[Mapping[str, Document]], None]
ShowPriorities = Callable[[Mapping[str, int]], None]

_ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")
_LIST_TIMEOUT_S = 10.0
# The server ends a watch after this time; a dead connection is detected slightly later.
_WATCH_S = 240
# Pauses double from the first to the longest, until a watch lasts for long enough.
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.1, 30.0
_LASTING_S = 10.0
# The limit of etcd is 1.5 MiB for an object.
_LONGEST_LINE_BYTES = 8 << 20
_GONE = 410


class _WatchExpiredError(OSError):
    """The version to watch from is too old."""


class _RejectedError(OSError):
    """The API server rejects a query.

    Attributes:
        retry_after_s: pause that it asks for; 0 if it asks for none.
    """

    def __init__(self, message: str, retry_after_s: float) -> None:
        super().__init__(message)
        self.retry_after_s = min(retry_after_s, _LONGEST_PAUSE_S)


class _Backoff:
    """Growing pauses with jitter between watches that end early."""

    def __init__(self) -> None:
        self._pause_s = 0.0
        self._resumed_at = asyncio.get_running_loop().time()

    async def pause(self, least_s: float = 0.0) -> None:
        """Sleep for at least `least_s`; longer each time if the work since the last pause was short."""
        clock = asyncio.get_running_loop().time
        is_early = clock() - self._resumed_at < _LASTING_S
        doubled_s = min(max(_FIRST_PAUSE_S, 2 * self._pause_s), _LONGEST_PAUSE_S)
        self._pause_s = doubled_s if is_early else 0.0
        # With jitter, so that watchers do not return to a restarted API server at once.
        jitter = random.uniform(0.5, 1.0)  # noqa: S311 - not for secrets
        await asyncio.sleep(max(least_s * (2.0 - jitter), self._pause_s * jitter))
        self._resumed_at = clock()


@dataclass(frozen=True, slots=True)
class ApiServer:
    """Access to the API server; the defaults are those of a pod."""

    url: str = ""
    account: Path = _ACCOUNT

    def base_url(self) -> str:
        """Return its address.

        Raises:
            OSError: this process does not run in a pod.
        """
        if self.url:
            return self.url
        host, port = os.environ.get("KUBERNETES_SERVICE_HOST"), os.environ.get("KUBERNETES_SERVICE_PORT")
        if not host or not port:
            raise OSError("there is no KUBERNETES_SERVICE_HOST: this process does not run in a pod")
        return f"https://[{host}]:{port}" if ":" in host else f"https://{host}:{port}"

    def token(self) -> str:
        """Return the token. Tokens are rotated hourly, so it is read for each request."""
        return (self.account / "token").read_text().strip()

    def trust(self) -> ssl.SSLContext:
        """Return the TLS context that trusts the cluster's certificate authority."""
        authority = self.account / "ca.crt"
        return ssl.create_default_context(cafile=str(authority) if authority.exists() else None)

    def namespace(self) -> str:
        """Return the namespace of this pod."""
        return (self.account / "namespace").read_text().strip()


@dataclass(frozen=True, slots=True)
class ObjectWatch:
    """List and watch of the objects of one kind in a namespace.

    Attributes:
        group: path of the API group and version.
        kind: plural name of the kind.
        labels: label selector; empty for all objects.
        namespace: empty for that of this pod.
    """

    api: ApiServer
    group: str
    kind: str
    labels: str
    namespace: str

    async def follow(self, show: Show, refresh_s: float, health: SourceHealth) -> None:
        """Call `show` with all objects, by name, after each change.

        Args:
            show: raises `OSError` if the objects are not those that are needed; they are listed again later.
        """
        backoff = _Backoff()
        while True:
            try:
                await self._list_and_watch(show, health, backoff)
            except _WatchExpiredError:
                await backoff.pause()
            # A document of another form than the API's must not end discovery.
            except (OSError, ValueError, LookupError, TypeError, AttributeError, UpstreamError) as exc:
                health.fail(
                    str(exc) if isinstance(exc, OSError) and str(exc) else f"{type(exc).__name__}: {exc}"
                )
                asked_s = exc.retry_after_s if isinstance(exc, _RejectedError) else 0.0
                await backoff.pause(max(refresh_s, asked_s))

    async def _list_and_watch(self, show: Show, health: SourceHealth, backoff: _Backoff) -> None:
        times = UpstreamSettings(connect_timeout_s=_LIST_TIMEOUT_S, silence_timeout_s=_WATCH_S + 30)
        connections = UpstreamPool(times, https=ClientTls(self.api.trust()))
        try:
            listed = await self._list(connections)
            objects = {_name(item): item for item in listed["items"] or ()}
            version = listed["metadata"]["resourceVersion"]
            show(objects)
            health.failure = ""
            while True:
                async for event in self._watch(connections, version):
                    item = event["object"]
                    version = item["metadata"]["resourceVersion"]
                    if event["type"] == "DELETED":
                        objects.pop(_name(item), None)
                    elif event["type"] != "BOOKMARK":
                        objects[_name(item)] = item
                    show(objects)
                await backoff.pause()
        finally:
            connections.close()

    async def _open(self, connections: UpstreamPool, **options: str) -> UpstreamResponse:
        """Request the objects of the resource.

        Raises:
            _WatchExpiredError: the version to watch from is too old.
            OSError: the API server rejects.
            UpstreamError: it does not answer.
        """
        server = EndpointUrl.parse(self.api.base_url())
        path = f"{self.group}/namespaces/{self.namespace or self.api.namespace()}/{self.kind}"
        query = urlencode({"labelSelector": self.labels, **options})
        head = (
            f"GET {server.path}{path}?{query} HTTP/1.1\r\n"
            f"host: {server.authority}\r\naccept: application/json\r\n"
            f"authorization: Bearer {self.api.token()}\r\n\r\n"
        )
        address = ServerAddress(server.host, server.port, server.scheme)
        response = await connections.send(address, head.encode("latin-1"), b"")
        if response.status == 200:
            return response
        with contextlib.closing(response):
            if response.status == _GONE:
                raise _WatchExpiredError("the version to watch from is too old")
            shown = ""
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_LIST_TIMEOUT_S):
                    shown = (await response.read())[:200].decode("utf-8", "replace")
            asked = response.header(b"retry-after")
            raise _RejectedError(
                f"{server}{path} answered {response.status}: {shown}",
                float(asked) if asked.isdigit() else 0.0,
            )

    async def _list(self, connections: UpstreamPool) -> Document:
        async with asyncio.timeout(_LIST_TIMEOUT_S):
            with contextlib.closing(await self._open(connections)) as response:
                listed: Document = json.loads(await response.read())
                return listed

    async def _watch(self, connections: UpstreamPool, version: str) -> AsyncIterator[Document]:
        response = await self._open(
            connections,
            watch="1",
            resourceVersion=version,
            allowWatchBookmarks="true",
            timeoutSeconds=str(_WATCH_S),
        )
        with contextlib.closing(response):
            async for line in _lines(response):
                event: Document = json.loads(line)
                if event["type"] == "ERROR":
                    if event["object"].get("code") == _GONE:
                        raise _WatchExpiredError("the version to watch from is too old")
                    raise OSError(f"the watch failed: {event['object'].get('message')}")
                yield event


@dataclass(frozen=True, slots=True)
class KubernetesSource:
    """Endpoints of a Service, or Pods of a label selector.

    Attributes:
        service: name of the Service; empty for Pods by `selector`.
        namespace: empty for that of this pod.
        ports: ports of each Pod; empty for the first port of the Service's endpoints.
    """

    scheme: Literal["http", "https"]
    service: str
    namespace: str
    selector: str
    ports: tuple[int, ...]
    path: str = ""
    api: ApiServer = field(default_factory=ApiServer)

    @classmethod
    def parse(cls, text: str) -> "KubernetesSource":
        """Parse `http://service.namespace:port/path` or `http://namespace:port?selector=app=vllm`.

        Raises:
            ValueError: it has neither form.
        """
        parts = urlsplit(text)
        asked = parse_qs(parts.query)
        selector = asked.pop("selector", [""])[0]
        rejection = (
            "Kubernetes endpoints look like kubernetes+http://service.namespace:8000 or "
            f"kubernetes+http://namespace:8000?selector=app=vllm, got {text!r}"
        )
        if parts.scheme not in ("http", "https") or not parts.hostname or asked or parts.fragment:
            raise ValueError(rejection)
        first, _, second = parts.hostname.partition(".")
        if selector and (second or parts.port is None):
            raise ValueError(rejection)
        return cls(
            scheme="https" if parts.scheme == "https" else "http",
            service="" if selector else first,
            namespace=first if selector else second.removesuffix(".svc.cluster.local").removesuffix(".svc"),
            selector=selector,
            ports=() if parts.port is None else (parts.port,),
            path=parts.path.rstrip("/").removesuffix("/v1"),
        )

    async def follow(self, publish: Publish, refresh_s: float, health: SourceHealth) -> None:
        """List and watch forever."""
        published: frozenset[EndpointUrl] | None = None
        reader = self._of_pod if self.selector else self._of_slice

        def show(objects: Mapping[str, Document]) -> None:
            nonlocal published
            pairs = [pair for item in objects.values() for pair in reader(item)]
            # A dual-stack Pod is in slices of both families but is one engine: its last URL counts, of IPv4.
            pairs.sort(key=lambda pair: (":" not in pair[1].host, pair[1].host))
            found = frozenset(dict(pairs).values())
            if found != published:
                published = found
                publish(found)

        await self._watch().follow(show, refresh_s, health)

    def _watch(self) -> ObjectWatch:
        if self.selector:
            return ObjectWatch(self.api, "/api/v1", "pods", self.selector, self.namespace)
        labels = f"kubernetes.io/service-name={self.service}"
        return ObjectWatch(self.api, "/apis/discovery.k8s.io/v1", "endpointslices", labels, self.namespace)

    def _of_slice(self, item: Document) -> Iterator[tuple[object, EndpointUrl]]:
        stated = [each["port"] for each in item.get("ports") or () if each.get("port")]
        ports = self.ports or tuple(stated[:1])
        for endpoint in item.get("endpoints") or ():
            conditions = endpoint.get("conditions") or {}
            # Terminating endpoints receive no new requests. By definition, an unknown condition is true.
            ready = conditions.get("ready") is not False and not conditions.get("terminating")
            pod = (endpoint.get("targetRef") or {}).get("uid")
            if ready:
                # All addresses of an endpoint lead to the same Pod.
                for address in endpoint["addresses"][:1]:
                    yield from (((pod or address, port), self._at(address, port)) for port in ports)

    def _of_pod(self, item: Document) -> Iterator[tuple[object, EndpointUrl]]:
        status = item.get("status") or {}
        conditions = {each["type"]: each["status"] for each in status.get("conditions") or ()}
        ends = item["metadata"].get("deletionTimestamp")
        if status.get("podIP") and conditions.get("Ready") == "True" and not ends:
            address = status["podIP"]
            yield from (((address, port), self._at(address, port)) for port in self.ports)

    def _at(self, address: str, port: int) -> EndpointUrl:
        # Certificates have the names of services, not addresses.
        name = f"{self.service}.{self.namespace}" if self.service and self.namespace else self.service
        return EndpointUrl(self.scheme, address, port, self.path, name if self.scheme == "https" else "")


@dataclass(frozen=True, slots=True)
class InferencePoolSource:
    """The Pods that an InferencePool of the Gateway API selects; each of its target ports is an endpoint.

    If the InferencePool is deleted, the Pods of its last version stay endpoints.

    Attributes:
        namespace: empty for that of this pod.
    """

    scheme: Literal["http", "https"]
    name: str
    namespace: str
    path: str = ""
    api: ApiServer = field(default_factory=ApiServer)

    @classmethod
    def parse(cls, text: str) -> "InferencePoolSource":
        """Parse `http://name.namespace/path`.

        Raises:
            ValueError: it does not have this form.
        """
        url = EndpointUrl.parse(text)
        if urlsplit(text).port is not None:
            raise ValueError(
                f"an InferencePool looks like inferencepool+http://name.namespace, got {text!r}: remove the "
                "port, which is the pool's"
            )
        name, _, namespace = url.host.partition(".")
        return cls(scheme=url.scheme, name=name, namespace=namespace, path=url.path)

    async def follow(self, publish: Publish, refresh_s: float, health: SourceHealth) -> None:
        """Follow the InferencePool, and the Pods that it selects."""
        current: KubernetesSource | None = None
        following: asyncio.Task[None] | None = None

        async with asyncio.TaskGroup() as tasks:

            def show(pools: Mapping[str, Document]) -> None:
                nonlocal current, following
                pods = self._pods(pools)
                if pods != current:
                    if following is not None:
                        following.cancel()
                    current = pods
                    following = tasks.create_task(pods.follow(publish, refresh_s, health))

            await self._watch().follow(show, refresh_s, health)

    async def follow_objectives(self, show: ShowPriorities, refresh_s: float, health: SourceHealth) -> None:
        """Report the priority of each InferenceObjective of the InferencePool by name, after each change."""

        def show_own(objectives: Mapping[str, Document]) -> None:
            show(
                {
                    name: item["spec"].get("priority", 0)
                    for name, item in objectives.items()
                    if item["spec"]["poolRef"]["name"] == self.name
                }
            )

        group = "/apis/inference.networking.x-k8s.io/v1alpha2"
        watch = ObjectWatch(self.api, group, "inferenceobjectives", "", self.namespace)
        await watch.follow(show_own, refresh_s, health)

    def _watch(self) -> ObjectWatch:
        # All of the namespace, so that a message can list their names.
        return ObjectWatch(
            self.api, "/apis/inference.networking.k8s.io/v1", "inferencepools", "", self.namespace
        )

    def _pods(self, pools: Mapping[str, Document]) -> KubernetesSource:
        """Return the source of the Pods that the InferencePool selects.

        Raises:
            OSError: it does not exist, or has no ports.
        """
        if (pool := pools.get(self.name)) is None:
            known = ", ".join(sorted(pools)) or "none"
            namespace = self.namespace or self.api.namespace()
            raise OSError(f"namespace {namespace} has no InferencePool {self.name} (existing: {known})")
        if not (target_ports := pool["spec"].get("targetPorts")):
            raise OSError(f"InferencePool {self.name} has no targetPorts")
        labels = pool["spec"]["selector"]["matchLabels"]
        return KubernetesSource(
            scheme=self.scheme,
            service="",
            namespace=self.namespace,
            selector=",".join(f"{key}={value}" for key, value in sorted(labels.items())),
            ports=tuple(port["number"] for port in target_ports),
            path=self.path,
            api=self.api,
        )


def _name(item: Document) -> str:
    name: str = item["metadata"]["name"]
    return name


async def _lines(response: UpstreamResponse) -> AsyncIterator[bytes]:
    """Yield non-empty lines.

    Raises:
        OSError: a line does not end.
    """
    rest = b""
    while piece := await response.next():
        *lines, rest = (rest + piece).split(b"\n")
        if len(rest) > _LONGEST_LINE_BYTES:
            raise OSError(f"a line of the watch is longer than {_LONGEST_LINE_BYTES:,} bytes")
        for line in lines:
            if line.strip():
                yield line


# Cheaper than resolving a name, and users who edit the file wait for the effect.
_REFRESH_S = 1.0


@dataclass(frozen=True, slots=True)
class PolledSource:
    """A source that is polled.

    Attributes:
        find: returns all endpoints; raises `OSError` or `ValueError` if the source cannot be read.
        longest_s: longest time between two calls of `find`, in seconds.
    """

    find: Callable[[], Awaitable[frozenset[EndpointUrl]]]
    longest_s: float = math.inf

    async def follow(self, publish: Publish, refresh_s: float, health: SourceHealth) -> None:
        """Call `find` forever, and report its result whenever it has changed."""
        found: frozenset[EndpointUrl] | None = None
        while True:
            try:
                now = await self.find()
            except (OSError, ValueError) as exc:
                # The last result stays valid.
                health.fail(str(exc))
            else:
                health.failure = ""
                if now != found:
                    found = now
                    publish(now)
            await asyncio.sleep(min(refresh_s, self.longest_s))


async def addresses(url: EndpointUrl) -> frozenset[EndpointUrl]:
    """Return an endpoint for each address of a name (A and AAAA, with this machine's resolver)."""
    # Raises if the name does not exist, so that a broken zone removes no endpoints.
    found = await asyncio.get_running_loop().getaddrinfo(url.host, url.port, type=socket.SOCK_STREAM)
    return frozenset(replace(url, host=str(address[0]), server_name=url.host) for *_, address in found)


async def service_records(url: EndpointUrl, resolver: Resolver | None = None) -> frozenset[EndpointUrl]:
    """Return an endpoint for each target of a name's SRV records, at the port of its record."""
    try:
        answer = await (resolver or Resolver()).resolve(url.host, "SRV", search=True)
    except DNSException as exc:
        raise OSError(f"{url.host} has no SRV records: {exc}") from exc
    # A target of "." means that the service does not exist (RFC 2782).
    targets = [(record.target.to_text(omit_final_dot=True), record.port) for record in answer]
    return frozenset(replace(url, host=host, port=port) for host, port in targets if host not in ("", "."))


def _path(text: str) -> Path:
    parts = urlsplit(text)
    if parts.netloc or not parts.path.startswith("/"):
        raise ValueError(f"a file of endpoints looks like file:///path, got {text!r}")
    return Path(unquote(parts.path))


async def _listed(path: Path) -> frozenset[EndpointUrl]:
    """Return the URLs in a file, one per line; `#` begins a comment. A line that is no URL is an error."""
    text = await asyncio.to_thread(path.read_text, encoding="utf-8")
    lines = (line.split("#", 1)[0].strip() for line in text.splitlines())
    return frozenset(EndpointUrl.parse(line) for line in lines if line)


_FORMS = (
    "http://host:8000, https://host, dns+http://name:8000, srv+http://_service._tcp.name, "
    "kubernetes+http://service.namespace:8000, kubernetes+http://namespace:8000?selector=app=vllm, "
    "inferencepool+http://name.namespace, file:///path"
)


@dataclass(frozen=True, slots=True)
class FixedSource:
    """One configured URL."""

    url: EndpointUrl

    async def follow(
        self,
        publish: Publish,
        refresh_s: float,  # noqa: ARG002 - nothing to refresh
        health: SourceHealth,  # noqa: ARG002 - nothing to read
    ) -> None:
        """Report the URL once."""
        publish(frozenset((self.url,)))


def source_of(text: str) -> EndpointSource:
    """Parse a configured source.

    Raises:
        ValueError: it has no known form.
    """
    if text.startswith(("http://", "https://")):
        return FixedSource(EndpointUrl.parse(text))
    kind, _, rest = text.partition("+")
    if kind == "dns":
        return PolledSource(functools.partial(addresses, EndpointUrl.parse(rest)))
    if kind == "srv":
        return PolledSource(functools.partial(service_records, EndpointUrl.parse(rest)))
    if kind == "kubernetes":
        return KubernetesSource.parse(rest)
    if kind == "inferencepool":
        return InferencePoolSource.parse(rest)
    if text.startswith("file://"):
        return PolledSource(functools.partial(_listed, _path(text)), _REFRESH_S)
    raise ValueError(f"endpoints: {text!r} is of no known form; known: {_FORMS}")
