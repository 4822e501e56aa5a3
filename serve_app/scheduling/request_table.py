"""Which requests does the scheduler know? By id, and by the gateway that answers for them."""

from collections.abc import Iterator

from serve_app.scheduling.request import Entry


class EntryBook:
    """All requests that wait or run."""

    def __init__(self) -> None:
        self._entries: dict[str, Entry] = {}
        self._by_gateway: dict[str, dict[str, Entry]] = {}

    def add(self, entry: Entry) -> None:
        """Remember a request that is not known yet."""
        request = entry.request
        self._entries[request.request_id] = entry
        self._by_gateway.setdefault(request.gateway_id, {})[request.request_id] = entry

    def get(self, request_id: str) -> Entry | None:
        """The request of this id, None when it is unknown or over."""
        return self._entries.get(request_id)

    def pop(self, request_id: str) -> Entry | None:
        """Forget a request and return it; None when it is not known."""
        entry = self._entries.pop(request_id, None)
        if entry is not None:
            siblings = self._by_gateway[entry.request.gateway_id]
            del siblings[request_id]
            if not siblings:
                del self._by_gateway[entry.request.gateway_id]
        return entry

    def of_gateway(self, gateway_id: str) -> list[Entry]:
        """All requests of one gateway."""
        return list(self._by_gateway.get(gateway_id, {}).values())

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._entries

    def __iter__(self) -> Iterator[Entry]:
        return iter(self._entries.values())

    def __len__(self) -> int:
        return len(self._entries)
