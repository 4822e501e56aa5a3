"""Metrics of gateways, which the scheduler collects for the gateway that is scraped."""

import asyncio
from collections.abc import Callable, Iterable, Mapping

from serve_app.serving.channel.link import Link
from serve_app.serving.channel.messages import GatewayPage, PageRequest

# Less than the second after which the requesting gateway gives up.
_EXPOSITION_TIMEOUT_S = 0.6


class GatewayMetrics:
    """Collector of the metrics of other gateways; `links` returns the connected ones by id."""

    def __init__(self, links: Callable[[], Mapping[str, Link]]) -> None:
        self._links = links
        self._serial = 0
        self._answers: dict[tuple[str, int], asyncio.Future[str]] = {}

    def __repr__(self) -> str:
        return f"<GatewayMetrics pending {len(self._answers)}>"

    async def of_others(self, gateway_id: str) -> Iterable[str]:
        """Return the metrics of all gateways but this one that arrive in time."""
        loop = asyncio.get_running_loop()
        self._serial += 1
        pending: dict[tuple[str, int], asyncio.Future[str]] = {}
        for name, link in self._links().items():
            if name != gateway_id and link.send(PageRequest(self._serial)):
                pending[name, self._serial] = loop.create_future()
        if not pending:
            return ()
        self._answers |= pending
        try:
            done, _ = await asyncio.wait(pending.values(), timeout=_EXPOSITION_TIMEOUT_S)
        finally:
            for key in pending:
                self._answers.pop(key, None)
        return [answer.result() for answer in pending.values() if answer in done]

    def on_metrics(self, gateway_id: str, message: GatewayPage) -> None:
        """Handle the metrics of a gateway; late ones are dropped."""
        answer = self._answers.get((gateway_id, message.serial))
        if answer is not None and not answer.done():
            answer.set_result(message.text)
