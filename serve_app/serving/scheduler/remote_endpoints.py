"""Endpoints of remote pools that are down, as their watchers report them."""

from collections.abc import Mapping
from typing import Any

from serve_app.serving.scheduler.gauges import Figures

Document = Mapping[str, Any]


class RemoteEndpoints:
    """The latest document of each remote pool's watcher; see `EndpointWatcher.states`."""

    def __init__(self) -> None:
        self._pools: dict[str, Document] = {}

    def __repr__(self) -> str:
        return f"<RemoteEndpoints {sum(len(each['down']) for each in self._pools.values())} down>"

    def update(self, document: Document) -> None:
        """Replace the document of a pool."""
        self._pools[document["pool"]] = document

    def documents(self) -> list[Document]:
        """Return the document of each remote pool."""
        return [self._pools[pool] for pool in sorted(self._pools)]

    def figures(self) -> Figures:
        """Return the numbers of endpoints by pool and state."""
        values: dict[tuple[str, ...], float] = {}
        for pool, document in self._pools.items():
            down = len(document["down"])
            values[pool, "up"], values[pool, "down"] = document["endpoints"] - down, down
        text = "Endpoints of remote pools, by whether they can be used."
        return Figures("ewsjf_endpoints", text, ("pool", "state"), values)
