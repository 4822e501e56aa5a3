"""Adapters of servers: what a server reports, and how its rejections are read.

- `EngineServer`: a server's description of itself, its control pages and a reading of its load.
- `samples`: looks up single samples in a page of Prometheus text, without parsing the rest of the page.
- `stated_context_limit`: the limit in an engine's error about a request that is too long.

`samples`. A page has 40 to 90 kB, most of it histogram buckets, and only a few samples are needed. A lookup
by name costs a few microseconds, parsing all lines several hundred.

Source: the Prometheus text format, in which the samples of a metric are contiguous and the next metric begins
with a comment. Pages without comments are searched to the end.

`stated_context_limit`. The texts of errors:

| engine | error text |
|---|---|
| vLLM | `maximum context length is N tokens`, `maximum model length of N`, `max_model_len=N` |
| SGLang | `longer than the model's context length (N tokens)`, `maximum context length of N tokens` |
| llama.cpp | `exceeds the available context size (N tokens)`; older releases: N in the field `n_ctx` only |
| llama-cpp-python | `exceed context window of N` |
| TGI | `inputs must have less than N tokens`, `max_new_tokens must be <= N` |
| TensorRT-LLM | `not exceed max_num_tokens (N)`, `max_seq_len (N)`, `exceeds maximum input length (N)` |
| Ollama | `the input length exceeds the context length`: without the limit; usually it truncates instead |

Some of these limits apply to the prompt only. Used as limits on prompt and output they are too low, never
too high.
"""

import json
import math
import re
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

from serve_app.errors import EngineError

_LABEL = re.compile(rb'([a-zA-Z_]\w*)="((?:[^"\\]|\\.)*)"')


def samples(page: bytes, name: bytes) -> list[tuple[bytes, float]]:
    """Return the finite samples of a metric as (unparsed labels, value).

    Raises:
        EngineError: a sample's line has no number.
    """
    if not page.startswith(b"#"):
        # The page begins with a sample, not with a comment.
        page = b"\n" + page
    # The delimiter excludes longer names that begin with this one.
    return _lines_after(page, b"\n" + name + b"{") or _lines_after(page, b"\n" + name + b" ")


def values(page: bytes, names: Sequence[bytes]) -> list[float]:
    """Return the values of the first name that the page has, or an empty list."""
    for name in names:
        if found := samples(page, name):
            return [value for _, value in found]
    return []


def total(page: bytes, *names: bytes) -> float | None:
    """Return the sum over the samples of the first name that the page has, or None."""
    found = values(page, names)
    return sum(found) if found else None


def count(page: bytes, *names: bytes) -> int | None:
    """Return `total` rounded to an integer."""
    found = total(page, *names)
    return None if found is None else round(found)


def mean(page: bytes, *names: bytes) -> float | None:
    """Return the mean over the samples of the first name that the page has, or None."""
    found = values(page, names)
    return sum(found) / len(found) if found else None


def first_of_each(found: list[tuple[bytes, float]], label: bytes) -> list[float]:
    """Return the first sample's value for each value of a label, counting a missing label as one value."""
    if len(found) < 2:
        return [value for _, value in found]
    pattern = re.compile(rb"(?:^|,)" + label + rb'="([^"]*)"')
    firsts: dict[bytes, float] = {}
    for written, value in found:
        match = pattern.search(written)
        firsts.setdefault(match.group(1) if match else b"", value)
    return list(firsts.values())


def labels(written: bytes) -> dict[str, str]:
    """Parse labels as returned by `samples`."""
    return {name.decode(): value.decode("utf-8", "replace") for name, value in _LABEL.findall(written)}


def _lines_after(page: bytes, opening: bytes) -> list[tuple[bytes, float]]:
    at = page.find(opening)
    if at < 0:
        return []
    metric_end = page.find(b"\n#", at + 1)
    if metric_end < 0:
        metric_end = len(page)
    found = []
    while 0 <= at < metric_end:
        start = at + len(opening)
        end = page.find(b"\n", start)
        end = len(page) if end < 0 else end
        sample = _sample(page, at + 1, start, end)
        # Ratios are NaN until something was counted.
        if math.isfinite(sample[1]):
            found.append(sample)
        at = page.find(opening, end, metric_end)
    return found


def _sample(page: bytes, line: int, start: int, end: int) -> tuple[bytes, float]:
    """Parse the sample of one line, whose labels or value begin at `start`."""
    # Label values may contain braces. The value and the timestamp after the last brace contain none.
    closing = page.rfind(b"}", start, end)
    written, rest = (b"", page[start:end]) if closing < 0 else (page[start:closing], page[closing + 1 : end])
    try:
        # A timestamp may follow the value.
        return written, float(rest.split(None, 1)[0])
    except (ValueError, IndexError) as exc:
        shown = page[line:end][:200].decode("utf-8", "replace")
        raise EngineError(f"the metrics have a line that is not Prometheus text: {shown!r}") from exc


TYPE_OF_LLAMA_CPP = "exceed_context_size_error"

_COUNT = r"(\d{1,3}(?:,\d{3})+|\d+)"
# Each alternative captures the limit in one group.
_WITH_LIMIT = re.compile(
    "|".join(
        (
            rf"maximum context length(?: is| of)? \(?{_COUNT}",
            rf"maximum model length of {_COUNT}",
            rf"cannot be greater than `?max_(?:model_len|total_tokens)`?\s*(?:=|of|:)?\s*\(?{_COUNT}",
            rf"model's context length \({_COUNT} tokens\)",
            rf"exceeds the available context size \({_COUNT} tokens\)",
            rf"\bn_ctx={_COUNT}",
            rf"exceed context window of {_COUNT}",
            rf"`?inputs`? must have less than {_COUNT} tokens",
            rf"`?max_new_tokens`? must be <= {_COUNT}",
            rf"should not exceed max_(?:num_tokens|seq_len|input_len) \({_COUNT}\)",
            rf"default_max_tokens`? \(-?\d+\) = max_seq_len \({_COUNT}\)",
            rf"[Pp]rompt length \(\d+\) exceeds maximum (?:input|sequence) length \({_COUNT}\)",
        )
    )
)
# Errors that do not state the limit, or may state it elsewhere in a future release.
_WITHOUT_LIMIT = re.compile(
    r"maximum context length|longer than the maximum model length"
    r"|cannot be greater than `?max_(?:model_len|total_tokens)"
    r"|longer than the model's context length"
    r"|exceeds the available context size"
    r"|input length exceeds the context length"
)


def is_too_long(message: str) -> bool:
    """Return whether an engine's error message says that the request exceeds its context limit."""
    return _WITHOUT_LIMIT.search(message) is not None or _WITH_LIMIT.search(message) is not None


def stated_context_limit(message: str) -> int | None:
    """Return the context limit in such an error message, in tokens, or None if it has none."""
    match = _WITH_LIMIT.search(message)
    if match is None:
        return None
    limit = next(int(group.replace(",", "")) for group in match.groups() if group is not None)
    return limit or None


@dataclass(frozen=True, slots=True)
class PageResponse:
    """Response to a request for a control page."""

    status: int
    body: bytes


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
        sleeps: whether an engine has left its GPU until it is woken up; it then shows no load.
    """

    waiting: int | None = None
    running: int | None = None
    kv_usage_ratio: float | None = None
    kv_tokens: int | None = None
    max_num_seqs: int | None = None
    token_gaps: int | None = None
    token_gaps_s: float | None = None
    steps: int | None = None
    sleeps: bool = False

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
    "kv_tokens": "KV cache size (kv_tokens): only in-flight requests are limited, not their tokens",
    "max_num_seqs": "maximum batch size (max_num_seqs): it is learned while the server is saturated",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineServer:
    """A server's description of itself. Adapters return it without models and load, which `identify` adds.

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
