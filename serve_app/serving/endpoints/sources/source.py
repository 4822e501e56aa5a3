"""What finds endpoints, and the form in which a configuration names it."""

from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any, Protocol

from serve_app.serving.endpoints.sources.dns import AddressSource, ServiceRecordSource
from serve_app.serving.endpoints.sources.file import FileSource
from serve_app.serving.endpoints.sources.kubernetes import KubernetesSource
from serve_app.serving.endpoints.url import EndpointUrl

Tell = Callable[[frozenset[EndpointUrl]], None]

_FORMS = (
    "http://host:8000, https://host, dns+http://name:8000, srv+http://_service._tcp.name, "
    "kubernetes+http://service.namespace:8000, kubernetes+http://namespace:8000?selector=app=vllm, "
    "file:///path"
)


class EndpointSource(Protocol):
    """Finds endpoints, for as long as it is followed."""

    @property
    def is_fixed(self) -> bool:
        """Whether what it finds never changes."""
        ...

    def follow(self, tell: Tell, refresh_s: float) -> Coroutine[Any, Any, None]:
        """Tell of all endpoints, again after each change. Ends only if nothing can change.

        While the place cannot be read, the endpoints that were told last remain: an outage of discovery must
        not take away engines that serve.
        """
        ...


@dataclass(frozen=True, slots=True)
class FixedSource:
    """One URL that a configuration states."""

    url: EndpointUrl
    is_fixed: bool = True

    async def follow(self, tell: Tell, refresh_s: float) -> None:  # noqa: ARG002 - nothing to refresh
        """Tell of it once."""
        tell(frozenset((self.url,)))


def source_of(text: str) -> EndpointSource:
    """What a configuration names.

    Raises:
        ValueError: it is none of the known forms.
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
