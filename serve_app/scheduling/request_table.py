"""Which requests does the scheduler know? By id, and by the gateway that answers for them."""

from collections.abc import Iterator

from serve_app.scheduling.request import ScheduledRequest


class RequestTable:
    """All requests that wait or run."""

    def __init__(self) -> None:
        self._requests: dict[str, ScheduledRequest] = {}
        self._by_gateway: dict[str, dict[str, ScheduledRequest]] = {}

    def add(self, scheduled: ScheduledRequest) -> None:
        """Remember a request that is not known yet."""
        request = scheduled.request
        self._requests[request.request_id] = scheduled
        self._by_gateway.setdefault(request.gateway_id, {})[request.request_id] = scheduled

    def get(self, request_id: str) -> ScheduledRequest | None:
        """The request of this id, None when it is unknown or over."""
        return self._requests.get(request_id)

    def pop(self, request_id: str) -> ScheduledRequest | None:
        """Forget a request and return it; None when it is not known."""
        scheduled = self._requests.pop(request_id, None)
        if scheduled is not None:
            siblings = self._by_gateway[scheduled.request.gateway_id]
            del siblings[request_id]
            if not siblings:
                del self._by_gateway[scheduled.request.gateway_id]
        return scheduled

    def of_gateway(self, gateway_id: str) -> list[ScheduledRequest]:
        """All requests of one gateway."""
        return list(self._by_gateway.get(gateway_id, {}).values())

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._requests

    def __iter__(self) -> Iterator[ScheduledRequest]:
        return iter(self._requests.values())

    def __len__(self) -> int:
        return len(self._requests)
