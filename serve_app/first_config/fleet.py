"""What there is to answer requests: emulated engines, GPUs of this machine, or servers that run already."""

import json
from dataclasses import dataclass
from pathlib import Path

from serve_app.errors import SettingsError

SHORT_CONTEXT = 8_192
"""Context of the short pool; four fifths and more of most traffic fit into it."""

DEFAULT_CONTEXT = 32_768


@dataclass(frozen=True, slots=True)
class Emulated:
    """Nothing: engines are emulated."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpus:
    """GPUs on which vLLM is to run one model.

    Attributes:
        count: how many may be used.
        model: a name on the model hub, or a folder.
        max_model_len: the longest context in tokens; None takes what the model's folder states, or 32,768.
        per_engine: GPUs of one engine (tensor parallelism).
        card: what they are, as their driver calls them; None when it is not known.
    """

    count: int
    model: str
    max_model_len: int | None = None
    per_engine: int = 1
    card: str | None = None

    def __post_init__(self) -> None:
        if self.count < self.per_engine:
            raise SettingsError(
                f"an engine on {self.per_engine} GPUs needs more than {self.count}: lower "
                "--gpus-per-engine or raise --gpus"
            )
        stated = stated_context(self.model)
        if self.max_model_len is not None and stated is not None and self.max_model_len > stated:
            raise SettingsError(
                f"max_model_len of {self.max_model_len:,} exceeds the {stated:,} tokens that "
                f"{self.model}/config.json states"
            )

    @property
    def engines(self) -> int:
        """How many engines fit."""
        return self.count // self.per_engine

    @property
    def context(self) -> int:
        """The longest context, in tokens."""
        return self.max_model_len or stated_context(self.model) or DEFAULT_CONTEXT

    @property
    def name(self) -> str:
        """What clients are to call the model."""
        return Path(self.model).name


@dataclass(frozen=True, slots=True, kw_only=True)
class Server:
    """A server that runs already, and what it says of itself.

    Attributes:
        url: without `/v1`.
        models: what it serves, the model itself before its adapters.
        max_model_len: its context in tokens.
    """

    url: str
    models: tuple[str, ...]
    max_model_len: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Servers:
    """OpenAI-compatible servers with vLLM's metrics.

    Attributes:
        api_key_env: environment variable with their key.
        max_num_seqs: most sequences in the batch of each, where they do not state it; None learns it.
    """

    found: tuple[Server, ...]
    api_key_env: str | None = None
    max_num_seqs: int | None = None


Fleet = Emulated | Gpus | Servers


def stated_context(model: str) -> int | None:
    """The context that the model's own folder states."""
    try:
        content = json.loads((Path(model).expanduser() / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    stated = content.get("max_position_embeddings") if isinstance(content, dict) else None
    return stated if isinstance(stated, int) else None
