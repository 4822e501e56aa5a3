"""Finds out which server answers at an address.

The names of a server's metrics tell it apart best: proxies rewrite headers, and many servers imitate the
list of models. Where the metrics are switched off, the owner in the list of models is the next best.
"""

from collections.abc import Awaitable, Callable

from serve_app.engines.adapters import openai_compatible, vllm
from serve_app.engines.adapters.control_pages import ControlPages
from serve_app.engines.adapters.server import EngineServer, Get

_Describe = Callable[[ControlPages], Awaitable[EngineServer]]

_BY_METRICS: tuple[tuple[bytes, _Describe], ...] = ((vllm.RUNNING, vllm.describe),)
_BY_OWNER: dict[str, _Describe] = {"vllm": vllm.describe}


async def identify(get: Get) -> EngineServer:
    """What answers, what it serves, its limits, and how to read its load.

    Args:
        get: gets a control page, with the server's key where it needs one.

    Raises:
        EngineError: nothing answers, the key is refused, or it has no list of models.
    """
    pages = ControlPages(get)
    entries = await pages.raw_models()
    metrics = await pages.text("/metrics")
    for name, describe in _BY_METRICS:
        if name in metrics:
            return await describe(pages)
    owners = {str(entry.get("owned_by")) for entry in entries}
    for owner in sorted(owners & _BY_OWNER.keys()):
        return await _BY_OWNER[owner](pages)
    return await openai_compatible.describe(pages)
