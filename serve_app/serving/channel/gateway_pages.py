"""The pages of metrics of all gateways, which each scrape of one of them shows.

Behind one address a scraper reaches a gateway by chance. The scheduler hears all of them, so it asks the
others for their pages and passes them on with its own. A gateway that does not answer in time is missing from
that scrape, and its counters go on with the next one.
"""

import asyncio
from collections.abc import Callable, Iterable, Mapping

from serve_app.serving.channel.link import Link
from serve_app.serving.channel.messages import GatewayPage, PageRequest

# Within the second that a gateway waits for the whole answer.
_PATIENCE_S = 0.6


class GatewayPages:
    """Asks all gateways at once.

    Args:
        links: those of the gateways that are connected now, by gateway id.
    """

    def __init__(self, links: Callable[[], Mapping[str, Link]]) -> None:
        self._links = links
        self._serial = 0
        self._answers: dict[tuple[str, int], asyncio.Future[str]] = {}

    def __repr__(self) -> str:
        return f"<GatewayPages asked {len(self._answers)}>"

    async def of_others(self, gateway_id: str) -> Iterable[str]:
        """The pages of all gateways but this one, as far as they come in time."""
        loop = asyncio.get_running_loop()
        self._serial += 1
        asked: dict[tuple[str, int], asyncio.Future[str]] = {}
        for name, link in self._links().items():
            if name != gateway_id and link.send(PageRequest(self._serial)):
                asked[name, self._serial] = loop.create_future()
        if not asked:
            return ()
        self._answers |= asked
        try:
            done, _ = await asyncio.wait(asked.values(), timeout=_PATIENCE_S)
        finally:
            for key in asked:
                self._answers.pop(key, None)
        return [answer.result() for answer in asked.values() if answer in done]

    def on_page(self, gateway_id: str, message: GatewayPage) -> None:
        """A gateway has answered; an answer that comes too late is dropped."""
        answer = self._answers.get((gateway_id, message.serial))
        if answer is not None and not answer.done():
            answer.set_result(message.text)
