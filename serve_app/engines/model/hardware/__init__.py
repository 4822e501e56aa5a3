"""Hardware data: GPUs and model architectures from data sheets, with measured efficiencies.

`gpus.yaml` and `models.yaml` hold the values with the source of each. To add a GPU or a model, add its values
there, and its profiles in `scripts/roofline_profiles.py`.

The architecture of other models is read from their `config.json`. Only models with identical layers are
supported: full attention and a gated feed-forward layer, dense or a mixture of experts, in 16 or 32 bits. For
others, such as models with sliding windows, compressed attention or quantised weights, the memory would be a
guess, so they have no architecture.
"""

import json
from collections.abc import Mapping
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Annotated, Any, TypeVar

import yaml
from pydantic import TypeAdapter

from serve_app.core.settings_base import POSITIVE, POSITIVE_SHARE, settings
from serve_app.errors import SettingsError

_DATA = resources.files("serve_app.engines.model.hardware")
GIB = 1024**3

Figures = TypeVar("Figures")


@settings
class Gpu:
    """A GPU, and the shares of its peak rates that an engine achieves.

    Attributes:
        memory_gib: memory visible to a process, which is less than the nominal size.
        bandwidth_per_s: peak bytes per second between memory and chip.
        flops: peak dense 16-bit floating-point operations per second of the matrix units.
        link_per_s: peak bytes per second to the other GPUs of the node, in one direction.
        bandwidth_efficiency: share of the bandwidth achieved when reading weights and KV cache (0-1).
        compute_efficiency: share of `flops` achieved by the matrix products of a prefill (0-1).
        attention_efficiency: share of `flops` achieved by attention (0-1).
        link_efficiency: share of `link_per_s` achieved by an all-reduce of a prefill (0-1).
        all_reduce_s: seconds of a small all-reduce; a decode step makes two per layer.
        layer_s: seconds per layer and decode step besides reading it: short kernels and gaps between them.
        step_s: seconds of a step outside the layers: scheduling, sampling, copies to the host.
        sequence_s: seconds of the host for each sequence of a step.
        evidence: what was measured on this GPU, and the error of the roofline.
        aliases: names used by NVIDIA's driver and Ray's `accelerator_type`.
    """

    memory_gib: Annotated[float, POSITIVE]
    bandwidth_per_s: Annotated[float, POSITIVE]
    flops: Annotated[float, POSITIVE]
    link_per_s: Annotated[float, POSITIVE]
    bandwidth_efficiency: Annotated[float, POSITIVE_SHARE]
    compute_efficiency: Annotated[float, POSITIVE_SHARE]
    attention_efficiency: Annotated[float, POSITIVE_SHARE]
    link_efficiency: Annotated[float, POSITIVE_SHARE]
    all_reduce_s: Annotated[float, POSITIVE]
    layer_s: Annotated[float, POSITIVE]
    step_s: Annotated[float, POSITIVE]
    sequence_s: Annotated[float, POSITIVE]
    evidence: str
    aliases: tuple[str, ...] = ()


@settings
class ModelArchitecture:
    """A decoder-only transformer with gated feed-forward layers, all of the same kind.

    Attributes:
        hidden: width of the residual stream.
        kv_heads: number of key-value heads, at most `heads`.
        intermediate: width of the feed-forward layer, or of each expert.
        experts: experts per layer; 1 for a dense model.
        experts_per_token: experts that each token is routed to.
        vocabulary: rows of the embedding.
        tied_embeddings: whether the output layer is the embedding.
        max_context_len: longest context of a profile, in tokens.
        published_parameters: parameter count of the model card, to compare with `parameters`; None if
            unknown.
        published_active_parameters: parameters that one token uses; None for a dense model.
        published_as: names on the model hub, without the owner, of models with exactly this architecture and
            `max_context_len`.
        kv_bytes: bytes per number in the KV cache.
    """

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocabulary: int
    max_context_len: int
    experts: int = 1
    experts_per_token: int = 1
    tied_embeddings: bool = False
    published_parameters: float | None = None
    published_active_parameters: float | None = None
    published_as: tuple[str, ...] = ()
    weight_bytes: float = 2.0
    kv_bytes: float = 2.0

    def __post_init__(self) -> None:
        if not 1 <= self.experts_per_token <= self.experts:
            raise ValueError(
                f"experts_per_token must be between 1 and experts ({self.experts}), "
                f"got {self.experts_per_token}"
            )
        if self.heads % self.kv_heads:
            raise ValueError(f"heads ({self.heads}) must be a multiple of kv_heads ({self.kv_heads})")

    @property
    def embedding_parameters(self) -> int:
        """Parameters of the embedding. The output layer has as many."""
        return self.vocabulary * self.hidden

    @property
    def expert_parameters(self) -> int:
        """Parameters of all experts in all layers; 0 for a dense model."""
        return self.experts * self._feed_forward if self.experts > 1 else 0

    @property
    def dense_parameters(self) -> int:
        """Parameters of the layers that every token uses."""
        attention = 2 * self.hidden * self.head_dim * (self.heads + self.kv_heads)
        router = self.hidden * self.experts if self.experts > 1 else 0
        feed_forward = 0 if self.experts > 1 else self._feed_forward
        return self.layers * (attention + router) + feed_forward

    @property
    def layer_parameters_per_token(self) -> int:
        """Parameters of the layers that one token is multiplied with."""
        return self.dense_parameters + self.expert_parameters * self.experts_per_token // self.experts

    @property
    def parameters(self) -> int:
        """All parameters of the model, except norms and biases, which are below 0.1 %."""
        embeddings = self.embedding_parameters * (1 if self.tied_embeddings else 2)
        return self.dense_parameters + self.expert_parameters + embeddings

    @property
    def weights_size(self) -> float:
        """Bytes of all weights."""
        return self.parameters * self.weight_bytes

    def kv_size_per_gpu(self, tensor_parallel: int) -> float:
        """Return the KV cache bytes of one token on each GPU. Heads that cannot be divided are replicated."""
        heads_per_gpu = -(-self.kv_heads // tensor_parallel)
        return 2 * self.layers * heads_per_gpu * self.head_dim * self.kv_bytes

    @property
    def _feed_forward(self) -> int:
        """Parameters of the gate, up and down projections of one expert, in all layers."""
        return self.layers * 3 * self.hidden * self.intermediate


def gpu_names() -> list[str]:
    """Return the names of the known GPUs."""
    return sorted(_gpus())


def model_names() -> list[str]:
    """Return the names of the known models."""
    return sorted(_models())


def load_gpu(name: str) -> Gpu:
    """Return the data of a GPU.

    Raises:
        SettingsError: the GPU is not known.
    """
    return _named("GPU", name, _gpus())


def load_model(name: str) -> ModelArchitecture:
    """Return the architecture of a model.

    Raises:
        SettingsError: the model is not known.
    """
    return _named("model", name, _models())


def find_gpu(card: str) -> str | None:
    """Return the name of a GPU, given that name or one in `Gpu.aliases`; None if it is not known."""
    for name, gpu in _gpus().items():
        if card.lower() in {name, *(each.lower() for each in gpu.aliases)}:
            return name
    return None


def find_model(published: str) -> ModelArchitecture | None:
    """Return the architecture of a model by its name on the hub without the owner; None if not known."""
    for model in _models().values():
        if published in model.published_as:
            return model
    return None


@cache
def _gpus() -> dict[str, Gpu]:
    return TypeAdapter(dict[str, Gpu]).validate_python(_read("gpus.yaml"))


@cache
def _models() -> dict[str, ModelArchitecture]:
    return TypeAdapter(dict[str, ModelArchitecture]).validate_python(_read("models.yaml"))


def _read(file: str) -> object:
    return yaml.safe_load((_DATA / file).read_text(encoding="utf-8"))


def _named(what: str, name: str, known: Mapping[str, Figures]) -> Figures:
    if name not in known:
        raise SettingsError(f"no figures for {what} {name!r}: use one of {', '.join(sorted(known))}")
    return known[name]


_UNDERSTOOD = {"llama", "mistral", "qwen2", "qwen3", "mixtral", "qwen3_moe"}
_WEIGHT_BYTES = {"bfloat16": 2.0, "float16": 2.0, "float32": 4.0}


def find_architecture(model: str) -> ModelArchitecture | None:
    """Return the architecture of a model by its folder or its name on the hub; None if not known."""
    folder = Path(model).expanduser()
    try:
        content = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except FileNotFoundError:
        return find_model(folder.name)
    except (OSError, ValueError):
        return None
    return architecture_of(content) if isinstance(content, Mapping) else None


def architecture_of(config: Mapping[str, Any]) -> ModelArchitecture | None:
    """Return the architecture that a `config.json` describes; None if it is not supported."""
    if config.get("model_type") not in _UNDERSTOOD or config.get("quantization_config"):
        return None
    if not _attends_to_everything(config):
        return None
    weight_bytes = _WEIGHT_BYTES.get(str(config.get("dtype") or config.get("torch_dtype") or "bfloat16"))
    feed_forward = _feed_forward(config)
    if weight_bytes is None or feed_forward is None:
        return None
    inner, experts, experts_per_token = feed_forward
    try:
        heads = int(config["num_attention_heads"])
        hidden = int(config["hidden_size"])
        return ModelArchitecture(
            layers=int(config["num_hidden_layers"]),
            hidden=hidden,
            heads=heads,
            kv_heads=int(config.get("num_key_value_heads") or heads),
            head_dim=int(config.get("head_dim") or hidden // heads),
            vocabulary=int(config["vocab_size"]),
            max_context_len=int(config["max_position_embeddings"]),
            tied_embeddings=bool(config.get("tie_word_embeddings", False)),
            weight_bytes=weight_bytes,
            kv_bytes=weight_bytes,
            intermediate=inner,
            experts=experts,
            experts_per_token=experts_per_token,
        )
    except (KeyError, TypeError, ValueError, ZeroDivisionError):
        return None


def _attends_to_everything(config: Mapping[str, Any]) -> bool:
    """Return whether the KV cache holds every token in every layer."""
    slides = config.get("sliding_window") is not None and config.get("use_sliding_window", True)
    kinds = set(config.get("layer_types") or ())
    return not slides and kinds <= {"full_attention"}


def _feed_forward(config: Mapping[str, Any]) -> tuple[int, int, int] | None:
    """Return width, experts and experts per token of the feed-forward layers; None if layers differ."""
    experts = config.get("num_local_experts") or config.get("num_experts") or 1
    if experts == 1:
        return config.get("intermediate_size", 0), 1, 1
    if config.get("decoder_sparse_step", 1) != 1 or config.get("mlp_only_layers"):
        return None
    inner = config.get("moe_intermediate_size") or config.get("intermediate_size", 0)
    return inner, experts, config.get("num_experts_per_tok", 1)
