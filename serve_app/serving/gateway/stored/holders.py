"""Which replica keeps a response, told from the response's id.

An engine keeps responses in its own memory, so whoever refers to one must get to that engine. vLLM lets the
request name its response. The name given here ends with random digits, and begins with a digest of the tenant
and the replica. Any gateway finds the replica by comparing digests, also one that was started later. Another
tenant's digests differ, so it finds none, and no name that it could make up is one that the engine knows.

Other servers name their responses themselves. Of those the last are remembered by the gateway that passed
them on, and by no other.
"""

import re
import secrets
from collections import OrderedDict
from collections.abc import Iterable
from hashlib import blake2b

import msgspec

from serve_app.serving.channel.scheduler_client import ReplicaAddress

_OURS = re.compile(r"resp_([0-9a-f]{16})[0-9a-f]{24}")
_RANDOM_BYTES = 12
# Some 200 bytes each.
_MOST_REMEMBERED = 10_000


class AnsweredResponse(msgspec.Struct):
    """The head of a response in an answer.

    Attributes:
        status: as `queued` or `completed`; empty where it has none.
    """

    id: str = ""
    status: str = ""

    @property
    def is_under_way(self) -> bool:
        """Whether its engine is still at work on it."""
        return self.status in ("queued", "in_progress")


class _AnnouncingEvent(msgspec.Struct):
    response: AnsweredResponse | None = None


_whole = msgspec.json.Decoder(AnsweredResponse)
_event = msgspec.json.Decoder(_AnnouncingEvent)
_DATA = re.compile(rb"^data:\s*(.+?)\s*$", re.MULTILINE)


class ResponseHolders:
    """Names responses, and finds the replicas that keep them."""

    def __init__(self) -> None:
        self._remembered: OrderedDict[str, tuple[str, str]] = OrderedDict()

    def __repr__(self) -> str:
        return f"<ResponseHolders remembered={len(self._remembered)}>"

    def name(self, owner: str, replica: ReplicaAddress) -> str:
        """A name for a new response.

        Args:
            owner: the tenant that may refer to it.
        """
        return f"resp_{_digest(owner, replica.replica_id)}{secrets.token_hex(_RANDOM_BYTES)}"

    def remember(self, response_id: str, owner: str, replica_id: str) -> None:
        """An engine that names its responses has made one."""
        self._remembered[response_id] = owner, replica_id
        self._remembered.move_to_end(response_id)
        while len(self._remembered) > _MOST_REMEMBERED:
            self._remembered.popitem(last=False)

    def find(self, response_id: str, owner: str, replicas: Iterable[ReplicaAddress]) -> ReplicaAddress | None:
        """The replica that keeps this tenant's response; None where none of these does."""
        kept = self._remembered.get(response_id)
        if kept is not None:
            whose, replica_id = kept
            return next((each for each in replicas if each.replica_id == replica_id and whose == owner), None)
        ours = _OURS.fullmatch(response_id)
        if ours is None:
            return None
        return next((each for each in replicas if _digest(owner, each.replica_id) == ours[1]), None)


def answered_response(body: bytes) -> AnsweredResponse:
    """The response that a whole answer is; without an id where it is something else."""
    try:
        return _whole.decode(body)
    except (ValueError, RecursionError):
        return AnsweredResponse()


def announced_response(events: bytes) -> AnsweredResponse:
    """The response that the first events of a stream tell of."""
    found = _DATA.search(events)
    try:
        event = _event.decode(found[1]) if found is not None else _AnnouncingEvent()
    except (ValueError, RecursionError):
        event = _AnnouncingEvent()
    return event.response or AnsweredResponse()


def _digest(owner: str, replica_id: str) -> str:
    both = b"".join(len(part).to_bytes(4, "big") + part for part in (owner.encode(), replica_id.encode()))
    return blake2b(both, digest_size=8, person=b"response holder").hexdigest()
