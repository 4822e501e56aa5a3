"""A source of endpoints: the protocol of all sources, and their health.

A source reports all endpoints at once, again after each change. While it cannot be read, the last result
stays valid, because an outage of discovery must not remove engines that serve.
"""

import logging
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any, Protocol

from serve_app.serving.remote.endpoint_url import EndpointUrl

logger = logging.getLogger("ray.serve")

Publish = Callable[[frozenset[EndpointUrl]], None]


@dataclass(slots=True)
class SourceHealth:
    """Why a source cannot be read, for operators; each reason is logged once.

    Attributes:
        source: its form in the configuration.
        failure: empty if it was read.
    """

    source: str
    failure: str = ""

    def fail(self, reason: str) -> None:
        """Record that it cannot be read."""
        if reason != self.failure:
            logger.warning("event=discovery_failed source=%s reason=%r", self.source, reason)
        self.failure = reason


class EndpointSource(Protocol):
    """A source of endpoints."""

    @property
    def is_fixed(self) -> bool:
        """True if its result never changes."""
        ...

    def follow(self, publish: Publish, refresh_s: float, health: SourceHealth) -> Coroutine[Any, Any, None]:
        """Report all endpoints, again after each change; return only if nothing can change.

        While the source cannot be read, the last result stays valid, because an outage of discovery must not
        remove engines that serve.
        """
        ...
