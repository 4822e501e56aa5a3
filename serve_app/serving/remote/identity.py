"""The identity of an endpoint: its server and limits, completed by the settings."""

import asyncio
from dataclasses import dataclass

from serve_app.engines.adapters import EngineServer, PageResponse, identify
from serve_app.errors import EngineError
from serve_app.serving.gateway.upstream.pool import UpstreamPool, UpstreamSettings
from serve_app.serving.remote.control import ControlClient, EndpointUnreachableError
from serve_app.serving.remote.endpoint_url import EndpointUrl
from serve_app.serving.remote.settings import RemoteSettings
from serve_app.serving.remote.sources import FixedSource, source_of


@dataclass(frozen=True, slots=True, kw_only=True)
class EndpointIdentity:
    """Server and limits of one endpoint, as it reports them or as configured.

    Attributes:
        max_model_len: as in `ReplicaSpec`, but None if unknown.
        kv_tokens, max_num_seqs: as in `ReplicaSpec`.
        tpot_s: as in `ReplicaSpec`; the mean over all tokens that the server had generated.
    """

    server: EngineServer
    max_model_len: int | None
    kv_tokens: int | None
    max_num_seqs: int | None
    tpot_s: float | None = None

    @property
    def adapters(self) -> tuple[str, ...]:
        """LoRA adapters that it lists."""
        return tuple(sorted(each.model for each in self.server.models if each.base is not None))


async def identified(control: ControlClient, url: EndpointUrl, settings: RemoteSettings) -> EndpointIdentity:
    """Identify an endpoint.

    Raises:
        EngineError: it does not answer, rejects the key, or lacks a model.
    """

    async def get(path: str) -> PageResponse:
        page = await control.get(path)
        return PageResponse(page.status, page.body, {})

    try:
        server = await identify(get)
    except EngineError as exc:
        if str(url) in str(exc):
            raise
        raise EngineError(f"{url}{exc}") from exc
    names = [listing.model for listing in server.models]
    wanted = settings.served_model_names or ()
    if missing := [name for name in wanted if name not in names]:
        raise EngineError(
            f"{url} serves {', '.join(names) or 'no model'} but not {', '.join(missing)}: start it with "
            f"--served-model-name {' '.join(wanted)}, or name another model here; a name that only clients "
            "use is a route (gateway.routes) and no alias"
        )
    stated = server.limits
    return EndpointIdentity(
        server=server,
        max_model_len=settings.max_model_len or stated.max_model_len,
        kv_tokens=settings.kv_tokens or stated.kv_tokens,
        max_num_seqs=settings.max_num_seqs or stated.max_num_seqs,
        tpot_s=await _mean_tpot_s(control, server),
    )


async def unusable_endpoints(settings: RemoteSettings) -> dict[str, str]:
    """Query the endpoints that are configured as URLs, and return why some cannot be used, by URL.

    Raises:
        EngineError: their API key is not known.
    """
    sources = (source_of(text) for text in settings.endpoints)
    urls = [source.url for source in sources if isinstance(source, FixedSource)]
    upstream = UpstreamPool(UpstreamSettings(connect_timeout_s=settings.metrics_timeout_s))
    key, failures = settings.key(), dict[str, str]()

    async def query(url: EndpointUrl) -> None:
        try:
            await identified(ControlClient(upstream, url, key, settings.metrics_timeout_s), url, settings)
        except EndpointUnreachableError as exc:
            failures[str(url)] = f"{exc}: start its server, or correct the URL"
        except EngineError as exc:
            failures[str(url)] = str(exc)

    await asyncio.gather(*map(query, urls))
    upstream.close()
    return failures


async def _mean_tpot_s(control: ControlClient, server: EngineServer) -> float | None:
    if server.metrics_path is None:
        return None
    reading = server.read(await control.page(server.metrics_path))
    return reading.token_gaps_s / reading.token_gaps if reading.token_gaps and reading.token_gaps_s else None
