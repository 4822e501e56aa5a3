"""Small ranking and embedding models with random weights and another model's tokenizer."""

import importlib
from pathlib import Path
from typing import Any

MAX_TOKENS, WIDTH = 256, 64


def make_ranking(folder: Path, tokenizer_of: Path) -> Path:
    """Write a cross-encoder, which scores a pair of texts; return its folder."""
    return _make(folder, tokenizer_of, "BertForSequenceClassification", num_labels=1)


def make_embedding(folder: Path, tokenizer_of: Path) -> Path:
    """Write an encoder, which embeds a text; return its folder."""
    return _make(folder, tokenizer_of, "BertModel")


def _make(folder: Path, tokenizer_of: Path, kind: str, **options: Any) -> Path:
    torch, transformers = (importlib.import_module(name) for name in ("torch", "transformers"))
    tokenizer = transformers.AutoTokenizer.from_pretrained(tokenizer_of)
    config = transformers.BertConfig(
        vocab_size=len(tokenizer),
        hidden_size=WIDTH,
        num_hidden_layers=2,
        num_attention_heads=1,
        intermediate_size=2 * WIDTH,
        max_position_embeddings=MAX_TOKENS,
        pad_token_id=tokenizer.pad_token_id,
        # With a smaller range, all texts are nearly alike.
        initializer_range=0.3,
        **options,
    )
    torch.manual_seed(0)
    getattr(transformers, kind)(config).save_pretrained(folder)
    tokenizer.model_max_length = MAX_TOKENS
    tokenizer.save_pretrained(folder)
    return folder
