"""A server that answers the OpenAI API: its description, its control pages, one reading of its load."""

import json
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass, fields
from typing import Any

from serve_app.errors import EngineError


@dataclass(frozen=True, slots=True)
class PageAnswer:
    """The answer of a server to a request for one of its control pages.

    Attributes:
        headers: names in lower case.
    """

    status: int
    body: bytes
    headers: Mapping[str, str]


_MODELS = "/v1/models"

# Gets a path, such as `/v1/models`, and raises `EngineError` when nothing answers.
Get = Callable[[str], Awaitable[PageAnswer]]


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineReading:
    """One reading of a server's load, summed over its engines; None for what the server does not tell.

    Attributes:
        waiting: requests in the engine's own queue.
        running: sequences in its batch.
        kv_usage_ratio: share of its KV cache in use, 0 to 1; the mean over its engines.
        kv_tokens: capacity of its KV cache in tokens.
        max_num_seqs: most sequences in its batch.
        token_gaps: gaps between output tokens since the server started. Some servers count the mean gap of
            each request instead; the quotient of the two is a time per output token all the same.
        token_gaps_s: their sum in seconds.
        steps: iterations that gave a token, since the server started.
    """

    waiting: int | None = None
    running: int | None = None
    kv_usage_ratio: float | None = None
    kv_tokens: int | None = None
    max_num_seqs: int | None = None
    token_gaps: int | None = None
    token_gaps_s: float | None = None
    steps: int | None = None

    @property
    def progress(self) -> tuple[float | None, ...] | None:
        """What changes while the engine computes; None when the server does not count its iterations.

        A long prompt takes iterations that give no token. Each of them takes more of the KV cache.
        """
        return None if self.steps is None else (self.steps, self.kv_usage_ratio, self.running, self.waiting)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelListing:
    """One name that a server serves.

    Attributes:
        model: the name that requests give.
        base: for a LoRA adapter, the name of the model that it belongs to.
        max_model_len: context limit in tokens, where the list states it.
    """

    model: str
    base: str | None = None
    max_model_len: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class StatedLimits:
    """The limits that a server states; None for each that it does not.

    Attributes:
        max_model_len: context limit, prompt and output together, in tokens.
        kv_tokens: capacity of the KV cache in tokens.
        max_num_seqs: most sequences in its batch; the number of slots of servers that have slots.
    """

    max_model_len: int | None = None
    kv_tokens: int | None = None
    max_num_seqs: int | None = None


def reads_nothing(_page: bytes) -> EngineReading:
    """The reading of a server that tells nothing of its load."""
    return EngineReading()


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineServer:
    """A server as it describes itself.

    Attributes:
        kind: the software, such as `vLLM`.
        version: of that software; None where it does not tell.
        models: the names that it serves, LoRA adapters after the models.
        lacks: what it does not tell, each in plain words with what is done instead.
        metrics_path: the page that tells its load; None when there is none.
        health_path: the page that answers 200 while it can serve.
        reader: reads that page; use `read`.
        names_responses: requests may name their responses (`request_id` in the body).
    """

    kind: str
    version: str | None = None
    models: tuple[ModelListing, ...] = ()
    limits: StatedLimits = StatedLimits()
    lacks: tuple[str, ...] = ()
    metrics_path: str | None = None
    health_path: str = "/health"
    reader: Callable[[bytes], EngineReading] = reads_nothing
    names_responses: bool = False

    def read(self, page: bytes) -> EngineReading:
        """Read the page of `metrics_path`.

        Raises:
            EngineError: it is not the page of this kind of server.
        """
        return self.reader(page)

    def __repr__(self) -> str:
        names = ", ".join(listing.model for listing in self.models)
        return f"<EngineServer {self.kind} {self.version or '?'} serves {names or 'nothing'}>"


_INSTEAD = {
    "waiting": "the length of its queue: it gets no more requests at once than their latency allows",
    "running": "the size of its present batch: requests sent and not answered are counted instead",
    "kv_usage_ratio": "how full its KV cache is: only what requests are expected to need counts",
    "token_gaps": "the time per output token: it is measured from the answers that it streams",
    "max_model_len": "its context limit (max_model_len): it is learned from what the server refuses",
    "kv_tokens": "the size of its KV cache (kv_tokens): the number of requests is the only limit",
    "max_num_seqs": "the size of its batch (max_num_seqs): it is learned while the server is busy",
}


def missing(limits: StatedLimits, reading: EngineReading) -> tuple[str, ...]:
    """What neither the limits nor a reading of the load tell, in plain words."""
    told = {
        field.name
        for source in (limits, reading)
        for field in fields(source)
        if getattr(source, field.name) is not None
    }
    return tuple(words for name, words in _INSTEAD.items() if name not in told)


def listed_context(listings: Iterable[ModelListing]) -> int | None:
    """The shortest context limit that a list of models states: the models share one engine."""
    stated = [listing.max_model_len for listing in listings if listing.max_model_len is not None]
    return min(stated, default=None)


def whole(value: object) -> int | None:
    """A positive whole number of a page of JSON; None for anything else."""
    return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else None


def refused(path: str, answer: PageAnswer) -> EngineError:
    """The error for a page that did not answer 200."""
    if answer.status in (401, 403):
        return EngineError(f"{path} answered {answer.status}: give the server's key as api_key")
    return EngineError(f"{path} answered {answer.status}: {answer.body[:200].decode('utf-8', 'replace')}")


# -- control pages ----------------------------------------------------------------------------------------


class ControlPages:
    """Gets pages of one server, and keeps their answers for whoever asks again."""

    def __init__(self, get: Get) -> None:
        self._get = get
        self._answers: dict[str, PageAnswer] = {}

    def __repr__(self) -> str:
        return f"<ControlPages {list(self._answers)}>"

    async def answer(self, path: str) -> PageAnswer:
        """The answer for a path, whatever its status.

        Raises:
            EngineError: nothing answers, or the server refuses the key.
        """
        if path not in self._answers:
            answer = await self._get(path)
            if answer.status in (401, 403):
                raise refused(path, answer)
            self._answers[path] = answer
        return self._answers[path]

    async def text(self, path: str) -> bytes:
        """The body of a page; empty when the server does not have it."""
        answer = await self.answer(path)
        return answer.body if answer.status == 200 else b""

    async def json(self, path: str) -> Mapping[str, Any]:
        """The object on a page; empty when there is none."""
        found = _parsed(await self.text(path))
        return found if isinstance(found, dict) else {}

    async def stated(self, path: str, name: str) -> str | None:
        """One text of the object on a page, such as a version; None when it is not there."""
        value = (await self.json(path)).get(name)
        return value if isinstance(value, str) and value else None

    async def raw_models(self) -> list[Mapping[str, Any]]:
        """The entries of the server's list of models.

        Raises:
            EngineError: it has no such list.
        """
        answer = await self.answer(_MODELS)
        if answer.status != 200:
            raise refused(_MODELS, answer)
        found = _parsed(answer.body)
        entries = found.get("data") if isinstance(found, dict) else None
        if not isinstance(entries, list) or not all(_has_id(entry) for entry in entries):
            shown = answer.body[:200].decode("utf-8", "replace")
            raise EngineError(f"{_MODELS} is no list of models: {shown!r}")
        return entries

    async def models(self) -> tuple[ModelListing, ...]:
        """The names that the server serves, adapters after the models that they belong to.

        Raises:
            EngineError: it has no list of models.
        """
        listings = [
            ModelListing(
                model=name,
                base=parent if isinstance(parent := entry.get("parent"), str) else None,
                max_model_len=whole(entry.get("max_model_len")),
            )
            for entry in await self.raw_models()
            for name in _names(entry)
        ]
        return tuple(sorted(listings, key=lambda listing: listing.base is not None))


def _has_id(entry: object) -> bool:
    return isinstance(entry, dict) and isinstance(entry.get("id"), str)


def _names(entry: Mapping[str, Any]) -> list[str]:
    """The names of one model: llama.cpp lists aliases beside the first."""
    aliases = entry.get("aliases")
    others = [alias for alias in aliases if isinstance(alias, str)] if isinstance(aliases, list) else []
    return list(dict.fromkeys([entry["id"], *others]))


def _parsed(body: bytes) -> Any:
    try:
        return json.loads(body)
    except ValueError:
        return None
