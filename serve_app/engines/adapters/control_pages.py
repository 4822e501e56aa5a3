"""The control pages of one server, each asked for once."""

import json
from collections.abc import Mapping
from typing import Any

from serve_app.engines.adapters.server import Get, ModelListing, PageAnswer, refused, whole
from serve_app.errors import EngineError

_MODELS = "/v1/models"


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
