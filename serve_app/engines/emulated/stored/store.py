"""The store of responses: what each was asked, what became of it, and the events that told of it."""

import asyncio
from collections import OrderedDict
from dataclasses import dataclass, field
from typing import Any

import msgspec

from serve_app.engines.emulated.errors import ApiError

# vLLM never forgets one, which its log calls a leak.
_MOST_RESPONSES = 1_000
_DATA = b"\ndata: "

Document = dict[str, Any]


@dataclass(slots=True, eq=False)
class StoredResponse:
    """One response.

    Attributes:
        conversation: the messages that it answers.
        queued: what is told of it until it ends.
        answer: what the engine answered: a document, or a stream's events.
        streams: whether it is events.
        ended: set once nothing will be added.
        task: the work on it, where that is in the background.
        status: what has ended it otherwise than by an answer; empty for none.
    """

    conversation: list[Document]
    queued: Document
    streams: bool
    answer: bytearray = field(default_factory=bytearray)
    ended: asyncio.Event = field(default_factory=asyncio.Event)
    grown: asyncio.Event = field(default_factory=asyncio.Event)
    task: asyncio.Task[None] | None = None
    status: str = ""

    def add(self, piece: bytes) -> None:
        """The engine has answered more."""
        self.answer += piece
        self.grown.set()

    def end(self, status: str = "") -> None:
        """Nothing more will come."""
        self.status = self.status or status
        self.ended.set()
        self.grown.set()

    def events(self) -> list[bytes]:
        """The events so far, each with the empty line at its end."""
        return [event + b"\n\n" for event in bytes(self.answer).split(b"\n\n")[:-1]]

    def document(self) -> Document:
        """The response as it is now."""
        if self.status or not self.ended.is_set():
            return {**self.queued, "status": self.status or self.queued["status"]}
        if not self.streams:
            return _object(bytes(self.answer))
        return _object(_object(self.events()[-1].partition(_DATA)[2])["response"])

    def messages(self) -> list[Document]:
        """The conversation with the answer, for the next turn."""
        said = [
            {"role": "assistant", "content": item["content"][0]["text"]}
            for item in self.document()["output"]
            if item["type"] == "message"
        ]
        return [*self.conversation, *said]


class ResponseStore:
    """The last responses, by id."""

    def __init__(self) -> None:
        self._responses: OrderedDict[str, StoredResponse] = OrderedDict()

    def __repr__(self) -> str:
        return f"<ResponseStore {len(self._responses)}>"

    def keep(self, response_id: str, response: StoredResponse) -> None:
        """Add one; the oldest make way for it."""
        self._responses[response_id] = response
        while len(self._responses) > _MOST_RESPONSES:
            self._responses.popitem(last=False)

    def forget(self, response_id: str) -> None:
        """One has come to nothing."""
        self._responses.pop(response_id, None)

    def find(self, response_id: str) -> StoredResponse:
        """The response of this id.

        Raises:
            ApiError: 404, in vLLM's words.
        """
        found = self._responses.get(response_id)
        if found is None:
            message = f"Response with id '{response_id}' not found."
            raise ApiError(404, message, kind="invalid_request_error", param="response_id")
        return found


def _object(value: Any) -> Document:
    found: Document = msgspec.json.decode(value) if isinstance(value, bytes) else value
    return found
