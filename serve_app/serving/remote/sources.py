"""Discovery of endpoints: sources that a configuration names, and the endpoints that each finds.

Sources are a URL, DNS addresses, DNS service records, a file, and Kubernetes. A source reports all endpoints
at once, again after each change. While it cannot be read, the last result stays valid, because an outage of
discovery must not remove engines that serve.
"""

import asyncio
import json
import logging
import os
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

# URL of one endpoint.


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


# Sources that are polled.


logger = logging.getLogger("ray.serve")


async def poll(
    name: str,
    find: Callable[[], Awaitable[frozenset[EndpointUrl]]],
    publish: Callable[[frozenset[EndpointUrl]], None],
    refresh_s: float,
) -> None:
    """Call `find` forever, and report its result whenever it has changed.

    Args:
        name: name of the source in messages.
        find: raises `OSError` or `ValueError` if the source cannot be read.
        refresh_s: time between two calls, in seconds.
    """
    found: frozenset[EndpointUrl] | None = None
    failed = ""
    while True:
        try:
            now = await find()
        except (OSError, ValueError) as exc:
            # Logged once per cause; the last result stays valid.
            if str(exc) != failed:
                logger.warning("event=discovery_failed source=%s reason=%r", name, str(exc))
            failed = str(exc)
        else:
            failed = ""
            if now != found:
                found = now
                publish(now)
        await asyncio.sleep(refresh_s)


# Discovery by DNS: the addresses of a name, or the targets of SRV records.


Publish = Callable[[frozenset[EndpointUrl]], None]


@dataclass(frozen=True, slots=True)
class AddressSource:
    """Each address of a name is an endpoint (A and AAAA, with this machine's resolver)."""

    url: EndpointUrl
    is_fixed: bool = False

    async def follow(self, publish: Publish, refresh_s: float) -> None:
        """Resolve the name periodically."""
        await poll(f"dns+{self.url}", self._find, publish, refresh_s)

    async def _find(self) -> frozenset[EndpointUrl]:
        url = self.url
        # Raises if the name does not exist, so that a broken zone removes no endpoints.
        found = await asyncio.get_running_loop().getaddrinfo(url.host, url.port, type=socket.SOCK_STREAM)
        return frozenset(replace(url, host=str(address[0]), server_name=url.host) for *_, address in found)


@dataclass(frozen=True, slots=True)
class ServiceRecordSource:
    """Each target of a name's SRV records is an endpoint, at the port of its record."""

    url: EndpointUrl
    is_fixed: bool = False
    resolver: Resolver | None = None

    async def follow(self, publish: Publish, refresh_s: float) -> None:
        """Query the records periodically."""
        await poll(f"srv+{self.url}", self._find, publish, refresh_s)

    async def _find(self) -> frozenset[EndpointUrl]:
        try:
            answer = await (self.resolver or Resolver()).resolve(self.url.host, "SRV", search=True)
        except DNSException as exc:
            raise OSError(f"{self.url.host} has no SRV records: {exc}") from exc
        # A target of "." means that the service does not exist (RFC 2782).
        targets = [(record.target.to_text(omit_final_dot=True), record.port) for record in answer]
        return frozenset(
            replace(self.url, host=host, port=port) for host, port in targets if host not in ("", ".")
        )


# Discovery by a file: one URL per line; `#` begins a comment.


# Cheaper than resolving a name, and users who edit the file wait for the effect.
_REFRESH_S = 1.0


@dataclass(frozen=True, slots=True)
class FileSource:
    """URLs in a file. If a line is not a URL, the file is ignored and its last content stays valid."""

    path: Path
    is_fixed: bool = False

    @classmethod
    def parse(cls, text: str) -> "FileSource":
        """Parse `file:///path`.

        Raises:
            ValueError: the path is not absolute.
        """
        parts = urlsplit(text)
        if parts.netloc or not parts.path.startswith("/"):
            raise ValueError(f"a file of endpoints looks like file:///path, got {text!r}")
        return cls(Path(unquote(parts.path)))

    async def follow(self, publish: Publish, refresh_s: float) -> None:
        """Read the file periodically."""
        await poll(f"file://{self.path}", self._find, publish, min(refresh_s, _REFRESH_S))

    async def _find(self) -> frozenset[EndpointUrl]:
        text = await asyncio.to_thread(self.path.read_text, encoding="utf-8")
        lines = (line.split("#", 1)[0].strip() for line in text.splitlines())
        return frozenset(EndpointUrl.parse(line) for line in lines if line)


# Discovery by Kubernetes: the endpoints of a Service, or the Pods of a label selector.
#
# The API server is queried for a list, and then for a watch from the list's version. A watch whose version is
# too old restarts with a list, and a broken one is restarted; until then the last result stays valid.
#
# The pod needs a service account that may get, list and watch `endpointslices` (group `discovery.k8s.io`) or
# `pods` in the namespace.


Document = Mapping[str, Any]

_ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")
_LIST_TIMEOUT_S = 10.0
# The server ends a watch after this time; a dead connection is detected slightly later.
_WATCH_S = 240
_GONE = 410


class _WatchExpiredError(OSError):
    """The version to watch from is too old."""


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
class KubernetesSource:
    """Endpoints of a Service, or Pods of a label selector.

    Attributes:
        service: name of the Service; empty for Pods by `selector`.
        namespace: empty for that of this pod.
        port: None for the first port of the Service's endpoints.
    """

    scheme: Literal["http", "https"]
    service: str
    namespace: str
    selector: str
    port: int | None
    path: str = ""
    api: ApiServer = field(default_factory=ApiServer)
    is_fixed: bool = False

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
            port=parts.port,
            path=parts.path.rstrip("/").removesuffix("/v1"),
        )

    async def follow(self, publish: Publish, refresh_s: float) -> None:
        """List and watch forever."""
        failed = ""
        while True:
            try:
                await self._list_and_watch(publish)
                failed = ""
            except (OSError, ValueError, KeyError, UpstreamError, TimeoutError) as exc:
                reason = f"{type(exc).__name__}: {exc}"
                if reason != failed and not isinstance(exc, _WatchExpiredError):
                    logger.warning("event=discovery_failed source=kubernetes reason=%r", reason)
                failed = reason
                await asyncio.sleep(0 if isinstance(exc, _WatchExpiredError) else refresh_s)

    async def _list_and_watch(self, publish: Publish) -> None:
        times = UpstreamSettings(connect_timeout_s=_LIST_TIMEOUT_S, silence_timeout_s=_WATCH_S + 30)
        connections = UpstreamPool(times, https=ClientTls(self.api.trust()))
        try:
            listed = await self._list(connections)
            objects = {_name(item): item for item in listed["items"]}
            version = listed["metadata"]["resourceVersion"]
            published = self._publish_changes(publish, objects, None)
            while True:
                async for event in self._watch(connections, version):
                    item = event["object"]
                    version = item["metadata"]["resourceVersion"]
                    if event["type"] == "DELETED":
                        objects.pop(_name(item), None)
                    elif event["type"] != "BOOKMARK":
                        objects[_name(item)] = item
                    published = self._publish_changes(publish, objects, published)
        finally:
            connections.close()

    def _resource(self) -> tuple[str, str]:
        namespace = self.namespace or self.api.namespace()
        if self.selector:
            return f"/api/v1/namespaces/{namespace}/pods", self.selector
        path = f"/apis/discovery.k8s.io/v1/namespaces/{namespace}/endpointslices"
        return path, f"kubernetes.io/service-name={self.service}"

    async def _open(self, connections: UpstreamPool, **options: str) -> UpstreamResponse:
        """Request the objects of the resource.

        Raises:
            _WatchExpiredError: the version to watch from is too old.
            OSError: the API server rejects.
            UpstreamError: it does not answer.
        """
        server = EndpointUrl.parse(self.api.base_url())
        path, labels = self._resource()
        head = (
            f"GET {server.path}{path}?{urlencode({'labelSelector': labels, **options})} HTTP/1.1\r\n"
            f"host: {server.authority}\r\naccept: application/json\r\n"
            f"authorization: Bearer {self.api.token()}\r\n\r\n"
        )
        address = ServerAddress(server.host, server.port, server.scheme)
        response = await connections.send(address, head.encode("latin-1"), b"")
        if response.status == 200:
            return response
        try:
            if response.status == _GONE:
                raise _WatchExpiredError("the version to watch from is too old")
            shown = (await response.read())[:200].decode("utf-8", "replace")
            raise OSError(f"{server}{path} answered {response.status}: {shown}")
        finally:
            response.close()

    async def _list(self, connections: UpstreamPool) -> Document:
        async with asyncio.timeout(_LIST_TIMEOUT_S):
            response = await self._open(connections)
            try:
                listed: Document = json.loads(await response.read())
                return listed
            finally:
                response.close()

    async def _watch(self, connections: UpstreamPool, version: str) -> AsyncIterator[Document]:
        response = await self._open(
            connections,
            watch="1",
            resourceVersion=version,
            allowWatchBookmarks="true",
            timeoutSeconds=str(_WATCH_S),
        )
        try:
            async for line in _lines(response):
                event: Document = json.loads(line)
                if event["type"] == "ERROR":
                    if event["object"].get("code") == _GONE:
                        raise _WatchExpiredError("the version to watch from is too old")
                    raise OSError(f"the watch failed: {event['object'].get('message')}")
                yield event
        finally:
            response.close()

    def _publish_changes(
        self, publish: Publish, objects: Mapping[str, Document], published: frozenset[EndpointUrl] | None
    ) -> frozenset[EndpointUrl]:
        reader = self._of_pod if self.selector else self._of_slice
        found = frozenset(url for item in objects.values() for url in reader(item))
        if found != published:
            publish(found)
        return found

    def _of_slice(self, item: Document) -> Iterator[EndpointUrl]:
        stated = [each["port"] for each in item.get("ports") or () if each.get("port")]
        port = self.port or next(iter(stated), None)
        for endpoint in item.get("endpoints") or ():
            conditions = endpoint.get("conditions") or {}
            # Terminating endpoints receive no new requests. By definition, an unknown condition is true.
            ready = conditions.get("ready") is not False and not conditions.get("terminating")
            if port is not None and ready:
                yield from (self._at(address, port) for address in endpoint["addresses"])

    def _of_pod(self, item: Document) -> Iterator[EndpointUrl]:
        status = item.get("status") or {}
        conditions = {each["type"]: each["status"] for each in status.get("conditions") or ()}
        ends = item["metadata"].get("deletionTimestamp")
        if status.get("podIP") and conditions.get("Ready") == "True" and not ends:
            assert self.port is not None, "checked when it was parsed"
            yield self._at(status["podIP"], self.port)

    def _at(self, address: str, port: int) -> EndpointUrl:
        # Certificates have the names of services, not addresses.
        name = f"{self.service}.{self.namespace}" if self.service and self.namespace else self.service
        return EndpointUrl(self.scheme, address, port, self.path, name if self.scheme == "https" else "")


def _name(item: Document) -> str:
    name: str = item["metadata"]["name"]
    return name


async def _lines(response: UpstreamResponse) -> AsyncIterator[bytes]:
    """Yield non-empty lines of any length."""
    rest = b""
    while piece := await response.next():
        *lines, rest = (rest + piece).split(b"\n")
        for line in lines:
            if line.strip():
                yield line


# Sources, and their forms in a configuration.


_FORMS = (
    "http://host:8000, https://host, dns+http://name:8000, srv+http://_service._tcp.name, "
    "kubernetes+http://service.namespace:8000, kubernetes+http://namespace:8000?selector=app=vllm, "
    "file:///path"
)


class EndpointSource(Protocol):
    """A source of endpoints."""

    @property
    def is_fixed(self) -> bool:
        """True if its result never changes."""
        ...

    def follow(self, publish: Publish, refresh_s: float) -> Coroutine[Any, Any, None]:
        """Report all endpoints, again after each change; return only if nothing can change.

        While the source cannot be read, the last result stays valid, because an outage of discovery must not
        remove engines that serve.
        """
        ...


@dataclass(frozen=True, slots=True)
class FixedSource:
    """One configured URL."""

    url: EndpointUrl
    is_fixed: bool = True

    async def follow(self, publish: Publish, refresh_s: float) -> None:  # noqa: ARG002 - nothing to refresh
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
        return AddressSource(EndpointUrl.parse(rest))
    if kind == "srv":
        return ServiceRecordSource(EndpointUrl.parse(rest))
    if kind == "kubernetes":
        return KubernetesSource.parse(rest)
    if text.startswith("file://"):
        return FileSource.parse(text)
    raise ValueError(f"endpoints: {text!r} is of no known form; known: {_FORMS}")
