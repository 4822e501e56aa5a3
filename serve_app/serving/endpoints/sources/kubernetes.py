"""Endpoints by Kubernetes: those of a Service, or the Pods that a label selector chooses.

What changes is told by the API server: a list first, then a watch from its version on. A watch that is too
old begins anew with a list, and one that breaks is begun again; meanwhile what was told last remains.

A pod needs a service account that may get, list and watch `endpointslices` (group `discovery.k8s.io`), or
`pods`, in the namespace.
"""

import asyncio
import json
import logging
import os
import ssl
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal
from urllib.parse import parse_qs, urlsplit

import aiohttp

from serve_app.serving.endpoints.url import EndpointUrl

logger = logging.getLogger("ray.serve")

Tell = Callable[[frozenset[EndpointUrl]], None]
Document = Mapping[str, Any]

_ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")
_LIST_TIMEOUT_S = 10.0
# The server ends a watch after this long; a dead connection is noticed a little later.
_WATCH_S = 240
_GONE = 410


class _WatchExpiredError(OSError):
    """The version to watch from is too old."""


@dataclass(frozen=True, slots=True)
class ApiServer:
    """How the API server is reached; the defaults are those of a pod."""

    url: str = ""
    account: Path = _ACCOUNT

    def base_url(self) -> str:
        """Its address.

        Raises:
            OSError: this process does not run in a pod.
        """
        if self.url:
            return self.url
        host, port = os.environ.get("KUBERNETES_SERVICE_HOST"), os.environ.get("KUBERNETES_SERVICE_PORT")
        if not host or not port:
            raise OSError("there is no KUBERNETES_SERVICE_HOST: this process does not run in a pod")
        return f"https://[{host}]:{port}" if ":" in host else f"https://{host}:{port}"

    def headers(self) -> dict[str, str]:
        """Its credentials. Tokens are replaced every hour, so they are read for each request."""
        return {"authorization": f"Bearer {(self.account / 'token').read_text().strip()}"}

    def trust(self) -> ssl.SSLContext:
        """Whom a client trusts there."""
        authority = self.account / "ca.crt"
        return ssl.create_default_context(cafile=str(authority) if authority.exists() else None)

    def namespace(self) -> str:
        """The namespace of this pod."""
        return (self.account / "namespace").read_text().strip()


@dataclass(frozen=True, slots=True)
class KubernetesSource:
    """What a Service or a selector of Pods leads to.

    Attributes:
        service: name of the Service; empty for Pods by `selector`.
        namespace: empty for the one of this pod.
        port: None takes the port that the Service's endpoints state first.
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
        """Read `http://service.namespace:port/path` or `http://namespace:port?selector=app=vllm`.

        Raises:
            ValueError: it is neither.
        """
        parts = urlsplit(text)
        asked = parse_qs(parts.query)
        selector = asked.pop("selector", [""])[0]
        refusal = (
            "Kubernetes endpoints look like kubernetes+http://service.namespace:8000 or "
            f"kubernetes+http://namespace:8000?selector=app=vllm, got {text!r}"
        )
        if parts.scheme not in ("http", "https") or not parts.hostname or asked or parts.fragment:
            raise ValueError(refusal)
        first, _, second = parts.hostname.partition(".")
        if selector and (second or parts.port is None):
            raise ValueError(refusal)
        return cls(
            scheme="https" if parts.scheme == "https" else "http",
            service="" if selector else first,
            namespace=first if selector else second.removesuffix(".svc.cluster.local").removesuffix(".svc"),
            selector=selector,
            port=parts.port,
            path=parts.path.rstrip("/").removesuffix("/v1"),
        )

    async def follow(self, tell: Tell, refresh_s: float) -> None:
        """List and watch, for ever."""
        failed = ""
        while True:
            try:
                await self._list_and_watch(tell)
                failed = ""
            except (OSError, ValueError, KeyError, aiohttp.ClientError, TimeoutError) as exc:
                reason = f"{type(exc).__name__}: {exc}"
                if reason != failed and not isinstance(exc, _WatchExpiredError):
                    logger.warning("event=discovery_failed source=kubernetes reason=%r", reason)
                failed = reason
                await asyncio.sleep(0 if isinstance(exc, _WatchExpiredError) else refresh_s)

    async def _list_and_watch(self, tell: Tell) -> None:
        path, labels = self._resource()
        url = f"{self.api.base_url()}{path}"
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=_LIST_TIMEOUT_S, sock_read=_WATCH_S + 30)
        connector = aiohttp.TCPConnector(ssl=self.api.trust())
        async with aiohttp.ClientSession(connector=connector, timeout=timeout) as session:
            listed = await self._list(session, url, labels)
            objects = {_name(item): item for item in listed["items"]}
            version = listed["metadata"]["resourceVersion"]
            told = self._told(tell, objects, None)
            while True:
                async for event in self._watch(session, url, labels, version):
                    item = event["object"]
                    version = item["metadata"]["resourceVersion"]
                    if event["type"] == "DELETED":
                        objects.pop(_name(item), None)
                    elif event["type"] != "BOOKMARK":
                        objects[_name(item)] = item
                    told = self._told(tell, objects, told)

    def _resource(self) -> tuple[str, str]:
        namespace = self.namespace or self.api.namespace()
        if self.selector:
            return f"/api/v1/namespaces/{namespace}/pods", self.selector
        path = f"/apis/discovery.k8s.io/v1/namespaces/{namespace}/endpointslices"
        return path, f"kubernetes.io/service-name={self.service}"

    async def _list(self, session: aiohttp.ClientSession, url: str, labels: str) -> Document:
        async with asyncio.timeout(_LIST_TIMEOUT_S):
            headers = self.api.headers()
            async with session.get(url, params={"labelSelector": labels}, headers=headers) as response:
                if response.status != 200:
                    raise OSError(f"{url} answered {response.status}: {(await response.text())[:200]}")
                listed: Document = await response.json(content_type=None)
                return listed

    async def _watch(
        self, session: aiohttp.ClientSession, url: str, labels: str, version: str
    ) -> AsyncIterator[Document]:
        params = {
            "labelSelector": labels,
            "watch": "1",
            "resourceVersion": version,
            "allowWatchBookmarks": "true",
            "timeoutSeconds": str(_WATCH_S),
        }
        async with session.get(url, params=params, headers=self.api.headers()) as response:
            if response.status == _GONE:
                raise _WatchExpiredError("the version to watch from is too old")
            if response.status != 200:
                raise OSError(f"{url} answered {response.status} to a watch")
            async for line in _lines(response.content):
                event: Document = json.loads(line)
                if event["type"] == "ERROR":
                    if event["object"].get("code") == _GONE:
                        raise _WatchExpiredError("the version to watch from is too old")
                    raise OSError(f"the watch of {url} failed: {event['object'].get('message')}")
                yield event

    def _told(
        self, tell: Tell, objects: Mapping[str, Document], told: frozenset[EndpointUrl] | None
    ) -> frozenset[EndpointUrl]:
        reader = self._of_pod if self.selector else self._of_slice
        found = frozenset(url for item in objects.values() for url in reader(item))
        if found != told:
            tell(found)
        return found

    def _of_slice(self, item: Document) -> Iterator[EndpointUrl]:
        stated = [each["port"] for each in item.get("ports") or () if each.get("port")]
        port = self.port or next(iter(stated), None)
        for endpoint in item.get("endpoints") or ():
            conditions = endpoint.get("conditions") or {}
            # One that ends gets no new requests; what runs there goes on. An unknown condition is true.
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
        # Certificates name services, not addresses.
        name = f"{self.service}.{self.namespace}" if self.service and self.namespace else self.service
        return EndpointUrl(self.scheme, address, port, self.path, name if self.scheme == "https" else "")


def _name(item: Document) -> str:
    name: str = item["metadata"]["name"]
    return name


async def _lines(content: aiohttp.StreamReader) -> AsyncIterator[bytes]:
    """Lines of any length; a slice of a thousand endpoints is longer than a reader's limit for lines."""
    rest = b""
    async for piece in content.iter_any():
        *lines, rest = (rest + piece).split(b"\n")
        for line in lines:
            if line.strip():
                yield line
