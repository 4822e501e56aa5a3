"""The names that the emulated engine answers to: its model's, and those of LoRA adapters."""

from typing import Any

import msgspec

from serve_app.engines.emulated import errors


class _Adapter(msgspec.Struct):
    lora_name: str


_decoder = msgspec.json.Decoder(_Adapter)


class EmulatedNames:
    """All names as they stand now.

    Args:
        models: of the model; the first is its own.
        adapters: those that it has from its start.
    """

    def __init__(self, models: tuple[str, ...], adapters: tuple[str, ...]) -> None:
        self._models = models
        self._adapters = dict.fromkeys(adapters)

    def __repr__(self) -> str:
        return f"<EmulatedNames {', '.join((*self._models, *self._adapters))}>"

    @property
    def adapters(self) -> tuple[str, ...]:
        """The adapters of now, in alphabetical order."""
        return tuple(sorted(self._adapters))

    def check(self, model: str | None) -> str:
        """The name of the answer; a request without one is for the engine's own model."""
        if model and model not in self._models and model not in self._adapters:
            raise errors.unknown_model(model, (*self._models, *self._adapters))
        return model or self._models[0]

    def load(self, body: bytes) -> str:
        """Add the adapter that a request names."""
        name = _name(body)
        if name in self._adapters:
            raise errors.invalid(f"The lora adapter '{name}' has already been loaded.")
        self._adapters[name] = None
        return name

    def unload(self, body: bytes) -> str:
        """Remove the adapter that a request names."""
        name = _name(body)
        if name not in self._adapters:
            raise errors.unknown_model(name, self._models)
        del self._adapters[name]
        return name

    def cards(self, created: int, max_model_len: int) -> list[dict[str, Any]]:
        """The list of models, adapters with the model that they belong to."""
        own = self._models[0]
        names = [(name, own, None, max_model_len) for name in self._models]
        names += [(name, f"adapters/{name}", own, None) for name in self._adapters]  # type: ignore[misc]
        return [
            {
                "id": name,
                "object": "model",
                "created": created,
                "owned_by": "emulated",
                "root": root,
                "parent": parent,
                "max_model_len": limit,
                "permission": [],
            }
            for name, root, parent, limit in names
        ]


def _name(body: bytes) -> str:
    try:
        return _decoder.decode(body).lora_name
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise errors.unreadable(str(error)) from error
