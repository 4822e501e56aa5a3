"""Description of an OpenAI-compatible server, its control pages and a reading of its load."""

import json
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from serve_app.errors import EngineError


@dataclass(frozen=True, slots=True)
class PageResponse:
    """Response to a request for a control page. Header names are in lower case."""

    status: int
    body: bytes
    headers: Mapping[str, str]


_MODELS = "/v1/models"
# Fields of an entry of the model list with the context limit: vLLM and SGLang; Dynamo; OpenRouter and many
# others; Mistral. Dynamo lists 0 while it does not know it.
_CONTEXT_FIELDS = ("max_model_len", "context_window", "context_length", "max_context_length")

# Fetches a path such as `/v1/models`. Raises `EngineError` if the server does not answer.
Get = Callable[[str], Awaitable[PageResponse]]


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineReading:
    """One reading of a server's load, summed over its engines; None for values that it does not expose.

    Attributes:
        waiting: requests in the engine's internal queue.
        running: sequences in the batch.
        kv_usage_ratio: share of the KV cache in use, 0 to 1; the mean over the engines.
        kv_tokens: capacity of the KV cache in tokens.
        max_num_seqs: maximum number of sequences in a batch.
        token_gaps: inter-token gaps since the server started. Some servers count the mean gap of each request
            instead; `token_gaps_s / token_gaps` is a time per output token in both cases.
        token_gaps_s: sum of those gaps in seconds.
        steps: iterations that generated a token, since the server started.
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
        """A value that changes while the engine computes; None if the server does not count iterations.

        Iterations of a long prefill generate no token but increase the KV usage.
        """
        return None if self.steps is None else (self.steps, self.kv_usage_ratio, self.running, self.waiting)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelListing:
    """One name that a server serves.

    Attributes:
        model: the name that requests use.
        base: the base model's name if this is a LoRA adapter.
        max_model_len: context limit in tokens, if listed.
    """

    model: str
    base: str | None = None
    max_model_len: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ReportedLimits:
    """Limits that a server reports; None for each that it does not.

    Attributes:
        max_model_len: context limit, prompt and output together, in tokens.
        kv_tokens: capacity of the KV cache in tokens.
        max_num_seqs: maximum number of sequences in a batch, or the number of slots.
    """

    max_model_len: int | None = None
    kv_tokens: int | None = None
    max_num_seqs: int | None = None


def parse_nothing(_page: bytes) -> EngineReading:
    """Return an empty reading, for servers that expose no load metrics."""
    return EngineReading()


_LIMITATIONS = {
    "waiting": "queue length: in-flight requests are limited by the starts of their answers instead",
    "running": "batch size: in-flight requests are counted instead",
    "kv_usage_ratio": "KV usage: the expected tokens of in-flight requests are counted instead",
    "token_gaps": "time per output token: it is measured from streamed responses",
    "max_model_len": "context limit (max_model_len): it is learned from requests that the server rejects",
    "kv_tokens": "KV cache size (kv_tokens): it is learned if the queue is not exposed either",
    "max_num_seqs": "maximum batch size (max_num_seqs): it is learned while the server is saturated",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineServer:
    """A server's description of itself.

    Attributes:
        kind: the software, such as `vLLM`.
        version: the software's version; None if not reported.
        models: names that the server serves, base models before LoRA adapters.
        reading: its first load, from which it is known what the server exposes.
        metrics_path: page with the load; None if there is none.
        health_path: page that returns 200 while the server can serve requests.
        reader: parser of that page; call `read` instead.
        names_responses: whether a request may choose the id of its response (`request_id` in the body).
    """

    kind: str
    version: str | None = None
    models: tuple[ModelListing, ...] = ()
    limits: ReportedLimits = ReportedLimits()
    reading: EngineReading = field(default=EngineReading(), compare=False)
    metrics_path: str | None = None
    health_path: str = "/health"
    reader: Callable[[bytes], EngineReading] = parse_nothing
    names_responses: bool = False

    @property
    def limitations(self) -> tuple[str, ...]:
        """What the server does not expose, and what is used instead, in plain words."""
        reported = {
            each.name
            for source in (self.limits, self.reading)
            for each in fields(source)
            if getattr(source, each.name) is not None
        }
        return tuple(words for name, words in _LIMITATIONS.items() if name not in reported)

    def read(self, page: bytes) -> EngineReading:
        """Parse the page at `metrics_path`.

        Raises:
            EngineError: the page is not that of this kind of server.
        """
        return self.reader(page)

    def __repr__(self) -> str:
        names = ", ".join(listing.model for listing in self.models)
        return f"<EngineServer {self.kind} {self.version or '?'} serves {names or 'nothing'}>"


def listed_context(listings: Iterable[ModelListing]) -> int | None:
    """Return the smallest context limit in a model list. The models share one engine."""
    limits = [listing.max_model_len for listing in listings if listing.max_model_len is not None]
    return min(limits, default=None)


def positive_int(value: object) -> int | None:
    """Return `value` if it is a positive integer, otherwise None."""
    return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else None


def http_error(path: str, answer: PageResponse) -> EngineError:
    """Return the error for a page whose status is not 200."""
    if answer.status in (401, 403):
        return EngineError(f"{path} returned {answer.status}: set api_key to the server's key")
    return EngineError(
        f"{path} returned {answer.status}, {excerpt(answer.body)}: correct the URL if this is no "
        "OpenAI-compatible server"
    )


def excerpt(body: bytes) -> str:
    """Return the beginning of an answer for a message; a page for a browser is only named."""
    text = body[:200].decode("utf-8", "replace").strip()
    return "an HTML page, so this is another kind of server" if text.startswith("<") else text


# -- control pages ----------------------------------------------------------------------------------------


class ControlPages:
    """Cache of the pages of one server."""

    def __init__(self, get: Get) -> None:
        self._get = get
        self._answers: dict[str, PageResponse] = {}

    def __repr__(self) -> str:
        return f"<ControlPages {list(self._answers)}>"

    async def answer(self, path: str) -> PageResponse:
        """Return the response for a path, whatever its status.

        Raises:
            EngineError: the server does not answer, or rejects the key.
        """
        if path not in self._answers:
            answer = await self._get(path)
            if answer.status in (401, 403):
                raise http_error(path, answer)
            self._answers[path] = answer
        return self._answers[path]

    async def text(self, path: str) -> bytes:
        """Return the body of a page, or empty bytes if its status is not 200."""
        answer = await self.answer(path)
        return answer.body if answer.status == 200 else b""

    async def json(self, path: str) -> Mapping[str, Any]:
        """Return the JSON object on a page, or an empty mapping."""
        found = _parsed(await self.text(path))
        return found if isinstance(found, dict) else {}

    async def string_field(self, path: str, name: str) -> str | None:
        """Return one string of the JSON object on a page, such as a version, or None."""
        value = (await self.json(path)).get(name)
        return value if isinstance(value, str) and value else None

    async def raw_models(self) -> list[Mapping[str, Any]]:
        """Return the entries of the server's model list.

        Raises:
            EngineError: the server has no model list.
        """
        answer = await self.answer(_MODELS)
        if answer.status != 200:
            raise http_error(_MODELS, answer)
        found = _parsed(answer.body)
        entries = found.get("data") if isinstance(found, dict) else None
        if not isinstance(entries, list) or not all(_has_id(entry) for entry in entries):
            raise EngineError(
                f"{_MODELS} is not a list of models, {excerpt(answer.body)}: correct the URL if this is no "
                "OpenAI-compatible server"
            )
        return entries

    async def models(self) -> tuple[ModelListing, ...]:
        """Return the names that the server serves, base models before adapters.

        Raises:
            EngineError: the server has no model list.
        """
        listings = [
            ModelListing(
                model=name,
                base=parent if isinstance(parent := entry.get("parent"), str) else None,
                max_model_len=_context_of(entry),
            )
            for entry in await self.raw_models()
            for name in _names(entry)
        ]
        return tuple(sorted(listings, key=lambda listing: listing.base is not None))


def _has_id(entry: object) -> bool:
    return isinstance(entry, dict) and isinstance(entry.get("id"), str)


def _names(entry: Mapping[str, Any]) -> list[str]:
    """Return the names of one model. llama.cpp lists aliases in addition to the id."""
    aliases = entry.get("aliases")
    others = [alias for alias in aliases if isinstance(alias, str)] if isinstance(aliases, list) else []
    return list(dict.fromkeys([entry["id"], *others]))


def _context_of(entry: Mapping[str, Any]) -> int | None:
    """Return the context limit of one model in tokens; None if the list does not have it."""
    meta = entry.get("meta")
    stated = [positive_int(entry.get(name)) for name in _CONTEXT_FIELDS]
    # The context of a llama.cpp slot. Not `n_ctx_train`, the length of the training.
    stated.append(positive_int(meta.get("n_ctx")) if isinstance(meta, dict) else None)
    return min((limit for limit in stated if limit is not None), default=None)


def _parsed(body: bytes) -> Any:
    try:
        return json.loads(body)
    except ValueError:
        return None
