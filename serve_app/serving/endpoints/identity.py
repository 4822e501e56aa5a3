"""What an endpoint is to the scheduler: its server, and its limits, completed by the settings."""

from dataclasses import dataclass

from serve_app.engines.adapters import EngineServer, PageAnswer, identify
from serve_app.errors import EngineError
from serve_app.serving.endpoints.control import ControlClient
from serve_app.serving.endpoints.settings import RemoteSettings
from serve_app.serving.endpoints.url import EndpointUrl


@dataclass(frozen=True, slots=True, kw_only=True)
class EndpointIdentity:
    """One endpoint as it describes itself, completed by the settings.

    Attributes:
        max_model_len: as in `ReplicaSpec`, and None where it is not told.
        kv_tokens, max_num_seqs: as in `ReplicaSpec`.
        tpot_s: likewise; the mean over all that the server had generated when it was asked.
    """

    server: EngineServer
    max_model_len: int | None
    kv_tokens: int | None
    max_num_seqs: int | None
    tpot_s: float | None = None

    @property
    def adapters(self) -> tuple[str, ...]:
        """Names of the LoRA adapters that it lists."""
        return tuple(sorted(each.model for each in self.server.models if each.base is not None))


async def identified(control: ControlClient, url: EndpointUrl, settings: RemoteSettings) -> EndpointIdentity:
    """Ask an endpoint what it is.

    Raises:
        EngineError: it does not answer, refuses the key, or lacks a model.
    """

    async def get(path: str) -> PageAnswer:
        page = await control.get(path)
        return PageAnswer(page.status, page.body, {})

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
            f"--served-model-name {' '.join(wanted)}, or name another model here"
        )
    stated = server.limits
    return EndpointIdentity(
        server=server,
        max_model_len=settings.max_model_len or stated.max_model_len,
        kv_tokens=settings.kv_tokens or stated.kv_tokens,
        max_num_seqs=settings.max_num_seqs or stated.max_num_seqs,
        tpot_s=await _mean_tpot_s(control, server),
    )


async def _mean_tpot_s(control: ControlClient, server: EngineServer) -> float | None:
    if server.metrics_path is None:
        return None
    reading = server.read(await control.page(server.metrics_path))
    return reading.token_gaps_s / reading.token_gaps if reading.token_gaps and reading.token_gaps_s else None
