"""Sources that a configuration names: a URL, DNS, a file, Kubernetes and InferencePools, by their forms."""

from dataclasses import dataclass

from serve_app.serving.remote.endpoint_source import EndpointSource, Publish, SourceHealth
from serve_app.serving.remote.endpoint_url import EndpointUrl
from serve_app.serving.remote.kubernetes import InferencePoolSource, KubernetesSource
from serve_app.serving.remote.polled_sources import AddressSource, FileSource, ServiceRecordSource

_FORMS = (
    "http://host:8000, https://host, dns+http://name:8000, srv+http://_service._tcp.name, "
    "kubernetes+http://service.namespace:8000, kubernetes+http://namespace:8000?selector=app=vllm, "
    "inferencepool+http://name.namespace, file:///path"
)


@dataclass(frozen=True, slots=True)
class FixedSource:
    """One configured URL."""

    url: EndpointUrl
    is_fixed: bool = True

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
        return AddressSource(EndpointUrl.parse(rest))
    if kind == "srv":
        return ServiceRecordSource(EndpointUrl.parse(rest))
    if kind == "kubernetes":
        return KubernetesSource.parse(rest)
    if kind == "inferencepool":
        return InferencePoolSource.parse(rest)
    if text.startswith("file://"):
        return FileSource.parse(text)
    raise ValueError(f"endpoints: {text!r} is of no known form; known: {_FORMS}")
